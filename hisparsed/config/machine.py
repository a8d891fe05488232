"""What this machine allows: the kind of node, and how much host memory the node may use.

The kind is cuda, reference or simulated; GPUs are found through a probe that the caller passes in.
Memory is RAM in bytes, or the lowest cgroup limit (v2, else v1). Starts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hisparsed.config.node import NodeConfig
from hisparsed.errors import UserError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def machine_memory_bytes() -> int:
    """RAM in bytes, or the cgroup's limit where that is lower."""
    limit = cgroup_limit_bytes(_CGROUP_ROOT, _OWN_CGROUP)
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cgroup_limit_bytes(root: Path, own: Path) -> int | None:
    """The lowest memory limit (v2, else v1) from this process's cgroup up; ``None`` for none.

    ``root`` is where cgroups are mounted, ``own`` the process's list of its cgroups.
    """
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    limits = []
    for _number, controllers, place in entries:
        if not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / place.lstrip("/")
        for candidate in (folder, *folder.parents):
            limits += _read_limit(candidate / name)
            if candidate == base:
                break
    return min(limits, default=None)


def _read_limit(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []  # "max" is no limit


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
