"""Which of the three bodies this node gets, and the sentence that tells the operator.

The GPU question is asked through a function passed in. Not here: starting anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hisparsed.config.node import NodeConfig
from hisparsed.errors import UserError

NodeKind = Literal["cuda", "reference", "simulated"]
GpuProbe = Callable[[], Sequence[str]]
"""Returns the names of the NVIDIA GPUs that can be used, empty where there are none."""


@dataclass(frozen=True)
class DetectedKind:
    kind: NodeKind
    banner: str
    """One sentence for the start of the log and the terminal."""


def detect_node_kind(config: NodeConfig, probe: GpuProbe) -> DetectedKind:
    """The node kind to start; `auto` is cuda where an NVIDIA GPU is, else reference.

    Raises ``UserError`` for a cuda node without a GPU, or a GPU without a model to load.
    """
    if config.node == "simulated":
        return DetectedKind("simulated", "Simulated node: no model, virtual time, invented tokens.")
    if config.node == "reference":
        return DetectedKind("reference", f"Reference node, as configured. {_REFERENCE}")
    gpus = probe()
    if not gpus:
        if config.node == "cuda":
            raise UserError(
                "node: cuda is configured, but no NVIDIA GPU can be seen; "
                "check nvidia-smi, or set node: reference to run the small CPU model"
            )
        return DetectedKind("reference", f"Reference node: no NVIDIA GPU was found. {_REFERENCE}")
    if config.model is None:
        raise UserError(
            f"node: auto found {_gpu_text(gpus)}, but no model is configured; "
            "set model to a folder or a name that vLLM can load, or set node: reference"
        )
    return DetectedKind("cuda", f"CUDA node: {config.model} on {_gpu_text(gpus)}.")


_REFERENCE = (
    "A small model of random weights on the CPU: real scheduling, real KV bytes, meaningless text."
)


def _gpu_text(gpus: Sequence[str]) -> str:
    counts = {name: gpus.count(name) for name in dict.fromkeys(gpus)}
    return ", ".join(f"{count}x {name}" for name, count in counts.items())


def nvidia_gpus() -> list[str]:
    """The ``GpuProbe`` for real machines: asks the NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
