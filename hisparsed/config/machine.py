"""The limits of this machine: the kind of node, and how much host memory the node may use.

The kind is cuda, reference or simulated; GPUs are found through a probe that the caller passes in.
Memory is counted as the kernel does: RAM, and the limit and use of every cgroup around this process
(v1 and v2). Starts nothing.
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
    limits = [one.limit_bytes for one in cgroups_of(_CGROUP_ROOT, _OWN_CGROUP)]
    return min([psutil.virtual_memory().total, *limits])


def available_memory_bytes() -> int:
    """Bytes that this process and its children may still take.

    The least of what is free on the machine and in each cgroup around the process.
    """
    rooms = [one.room_bytes for one in cgroups_of(_CGROUP_ROOT, _OWN_CGROUP)]
    return min([psutil.virtual_memory().available, *rooms])


@dataclass(frozen=True)
class CgroupMemory:
    """One cgroup with a limit. ``used_bytes`` is without the file cache, which the kernel drops."""

    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class _Names:
    """Names of the files of one version of cgroups."""

    limit: str
    used: str
    cache: tuple[str, ...]


_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)


def cgroups_of(root: Path, own: Path) -> list[CgroupMemory]:
    """The cgroups with a memory limit (v1 and v2), from this process's own upwards.

    ``root`` is where cgroups are mounted, ``own`` the process's list of its cgroups.
    """
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _number, controllers, place in entries:
        if not controllers:
            base, names = root, _V2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", _V1
        else:
            continue
        folder = base / place.lstrip("/")
        for candidate in (folder, *folder.parents):
            limit = _number_in(candidate / names.limit)
            if limit is not None:
                found.append(CgroupMemory(limit, _used_bytes(candidate, names)))
            if candidate == base:
                break
    return found


def _used_bytes(folder: Path, names: _Names) -> int:
    used = _number_in(folder / names.used) or 0
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return used
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    cache = sum(int(stat[name]) for name in names.cache if stat.get(name, "").isdigit())
    return max(0, used - cache)


def _number_in(path: Path) -> int | None:
    """``None`` for "max", which means no limit, and for a missing file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


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
