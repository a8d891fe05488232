"""The doctor's view of the machine: one frozen picture, taken once, without judgement.

Everything that touches the operating system or the GPUs is here, so that the checks are functions
of a picture. Also finds and removes files of dead engines and daemons: it asks the kernel whether a
file in /dev/shm is still mapped, and removes only files that no process holds. Imports neither vLLM
nor torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hisparsed.config.machine import available_memory_bytes, machine_memory_bytes
from hisparsed.config.node import NodeConfig
from hisparsed.control.api.socket import is_live
from hisparsed.control.journal.store import FILE_NAME
from hisparsed.engine.compat.versions import installed_vllm
from hisparsed.engine.cuda.nvml import GpuReader, GpuReading, nvidia_library
from hisparsed.engine.cuda.proof.kept import KeptProofs
from hisparsed.engine.cuda.proof.question import Proof
from hisparsed.errors import UserError
from hisparsed.node.engine.processes import orphans
from hisparsed.node.engine.shared_memory import SharedMemoryRecord, is_held, remove_unheld
from hisparsed.node.resources import bind_tcp, noted_folder, state_lock

OFFLOAD_FILES = "vllm_offload_*"
"""vLLM's shared host memory, named after the engine."""


@dataclass(frozen=True, slots=True)
class ShmFile:
    path: Path
    size_bytes: int
    """Memory that it takes, which is less than its length where it has holes."""
    held: bool | None
    """Whether some process has it open or mapped; ``None`` where the kernel gives no answer."""


def shared_files(folder: Path, state_dir: Path) -> list[ShmFile]:
    """Of ``folder``, which is /dev/shm: vLLM's files, and those on record in ``state_dir``."""
    recorded = {Path(file.path) for file in SharedMemoryRecord(state_dir).left()}
    found = []
    for path in sorted({*folder.glob(OFFLOAD_FILES), *recorded}):
        try:
            size_bytes = path.lstat().st_blocks * 512
            found.append(ShmFile(path, size_bytes, is_held(path)))
        except FileNotFoundError:
            continue  # its engine has just removed it
    return found


def sweep(file: ShmFile) -> bool:
    """Remove a file that no process holds; returns whether it is gone. Checks again right
    before."""
    return remove_unheld(file.path)


def remove_folder(folder: Path) -> bool:
    """Remove a runtime folder of a dead daemon; returns whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


SHM = Path("/dev/shm")  # noqa: S108 (the kernel's, not a temporary file)
_NODES = Path("/sys/devices/system/node")
_HUGE_POOLS = Path("/sys/kernel/mm/hugepages")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TIME_ERROR = 5
"""The result of adjtimex(2) for a clock that is not synchronised."""
_SLOW = {
    "thermal-software": "heat (software)",
    "thermal-hardware": "heat (hardware)",
    "power-brake": "the power supply's brake",
}
"""Reasons for slow clocks that need attention, in words; a power cap is normal."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    used_bytes: int
    processes: int
    slowed_by: tuple[str, ...] = ()
    """Why its clocks are reduced, other than by its power limit."""


@dataclass(frozen=True, slots=True)
class Orphan:
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes throughout; ``None`` where the machine has no answer."""

    memory_bytes: int
    """RAM, or the cgroup's limit where that is lower."""
    available_bytes: int
    """Memory that the node may still take: of the machine, and of each cgroup that it is in."""
    shm_total_bytes: int
    shm_free_bytes: int
    shared_files: tuple[ShmFile, ...]
    memlock_bytes: int | None
    """``None`` means no limit."""
    kernel: str
    driver: str | None
    gpus: tuple[Gpu, ...]
    numa_free_bytes: tuple[int, ...]
    huge_pages: str | None
    """always, madvise or never."""
    clock_kept: bool | None
    unix_s: float
    disk_free_bytes: int
    """Where the state folder is."""
    taken_ports: tuple[str, ...]
    """Sentences that name setting and address."""
    daemon_answers: bool
    """A daemon serves on the control socket."""
    state_trouble: str | None
    """Why the state folder cannot be used."""
    dead_folder: Path | None
    """The runtime folder of a daemon that was killed."""
    vllm: str | None
    """Version of the vLLM that would be imported."""
    dead_socket: Path | None = None
    """The control socket of a daemon that was killed."""
    orphans: tuple[Orphan, ...] = ()
    """Processes of engines whose daemon was killed."""
    journal_bytes: int = 0
    """Disk space that the journal takes already."""
    huge_reserved_bytes: int = 0
    """Reserved as huge pages, which only programs that ask for them can use."""
    huge_free_bytes: int = 0
    """Its unused part."""
    proofs: tuple[Proof, ...] = ()
    """The proofs of hisparsed's kernels and copies on these GPUs; empty if none is kept."""
    kernels_doubt: str | None = None
    """Why hisparsed's kernels are no longer used."""


def read_machine(config: NodeConfig) -> Machine:
    """Examine the machine once. Takes free ports and locks for a moment, and starts nothing."""
    shm = shutil.disk_usage(SHM)
    driver, gpus = _gpus()
    lock_free, state_trouble = _state(config.state_dir)
    huge_reserved, huge_free = reserved_huge_pages(_HUGE_POOLS)
    proofs, doubt = KeptProofs(config.state_dir).latest()
    return Machine(
        memory_bytes=machine_memory_bytes(),
        available_bytes=available_memory_bytes(),
        huge_reserved_bytes=huge_reserved,
        huge_free_bytes=huge_free,
        shm_total_bytes=shm.total,
        shm_free_bytes=shm.free,
        shared_files=tuple(shared_files(SHM, config.state_dir)),
        memlock_bytes=_memlock(),
        kernel=platform.release(),
        driver=driver,
        gpus=gpus,
        numa_free_bytes=tuple(_numa_free()),
        huge_pages=_huge_pages(),
        clock_kept=_clock_kept(),
        unix_s=time.time(),
        disk_free_bytes=shutil.disk_usage(_nearest(config.state_dir)).free,
        taken_ports=tuple(_taken_ports(config)),
        daemon_answers=is_live(config.control_socket),
        state_trouble=state_trouble,
        dead_folder=noted_folder(config.state_dir) if lock_free else None,
        vllm=installed_vllm(),
        dead_socket=_dead_socket(config.control_socket) if lock_free else None,
        orphans=tuple(_orphans(config.state_dir)) if lock_free else (),
        journal_bytes=_journal_bytes(config.state_dir),
        proofs=proofs,
        kernels_doubt=doubt,
    )


def look_again(before: Machine, config: NodeConfig) -> Machine:
    """The machine again while a node runs: values that can change are read, all others are from
    ``before``. Does not touch the node."""
    shm = shutil.disk_usage(SHM)
    _, gpus = _gpus()
    proofs, doubt = KeptProofs(config.state_dir).latest()
    return replace(
        before,
        available_bytes=available_memory_bytes(),
        shm_free_bytes=shm.free,
        shared_files=tuple(shared_files(SHM, config.state_dir)),
        gpus=gpus,
        clock_kept=_clock_kept(),
        unix_s=time.time(),
        disk_free_bytes=shutil.disk_usage(_nearest(config.state_dir)).free,
        journal_bytes=_journal_bytes(config.state_dir),
        proofs=proofs,
        kernels_doubt=doubt,
    )


def _memlock() -> int | None:
    if os.geteuid() == 0:
        return None  # root has no limit on locked memory
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus() -> tuple[str | None, tuple[Gpu, ...]]:
    # Missing NVML values have their own finding, so they are not logged too.
    reader = GpuReader(nvidia_library(), os.environ, on_unreadable=lambda _: None)
    try:
        return reader.driver(), tuple(map(_gpu, reader.read()))
    finally:
        reader.close()


def _gpu(gpu: GpuReading) -> Gpu:
    return Gpu(
        name=gpu.name,
        total_bytes=gpu.memory_total_bytes or 0,
        used_bytes=gpu.memory_used_bytes or 0,
        processes=gpu.processes or 0,
        slowed_by=slow_words(gpu.slowed_by or ()),
    )


def slow_words(reasons: Iterable[str]) -> tuple[str, ...]:
    """Of NVML's reasons for slow clocks, those that need attention."""
    return tuple(_SLOW[reason] for reason in reasons if reason in _SLOW)


def _numa_free() -> Iterator[int]:
    for path in sorted(_NODES.glob("node*/meminfo")):
        match = re.search(r"MemFree:\s+(\d+) kB", path.read_text())
        if match:
            yield int(match[1]) * 1024


def _dead_socket(path: Path) -> Path | None:
    return path if path.is_socket() and not is_live(path) else None


def remove_socket(path: Path) -> bool:
    """Remove a socket without a listener; returns whether it is gone. Checks again before."""
    if _dead_socket(path) is not None:
        with contextlib.suppress(OSError):
            path.unlink()
    return not path.exists()


def _orphans(state_dir: Path) -> Iterator[Orphan]:
    for process in orphans(state_dir):
        with contextlib.suppress(psutil.Error):
            yield Orphan(process.pid, process.name())


def reserved_huge_pages(pools: Path) -> tuple[int, int]:
    """Bytes set aside as huge pages of every size, and how much of it is unused.

    ``pools`` has a folder for each size, such as `hugepages-2048kB`.
    """
    reserved = free = 0
    for pool in pools.glob("hugepages-*kB"):
        size_bytes = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        with contextlib.suppress(OSError, ValueError):
            reserved += int((pool / "nr_hugepages").read_text()) * size_bytes
            free += int((pool / "free_hugepages").read_text()) * size_bytes
    return reserved, free


def _huge_pages() -> str | None:
    try:
        match = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _clock_kept() -> bool | None:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _journal_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob(f"{FILE_NAME}*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _nearest(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _taken_ports(config: NodeConfig) -> Iterator[str]:
    addresses = {(config.api.host, config.api.port): "api.port"}
    addresses.setdefault((config.metrics.host, config.metrics.port), "metrics.port")
    for (host, port), key in addresses.items():
        try:
            bind_tcp(host, port, key=key).close()
        except UserError as error:
            yield str(error)


def _state(folder: Path) -> tuple[bool, str | None]:
    """Whether the lock was free, and the problem."""
    if not folder.exists():
        parent = _nearest(folder)
        if os.access(parent, os.W_OK | os.X_OK):
            return False, None  # the daemon creates it
        return False, f"state_dir: {folder} does not exist and {parent} cannot be written"
    try:
        with contextlib.ExitStack() as held:
            held.enter_context(state_lock(folder))
            return True, None
    except UserError as error:
        return False, str(error)
    except OSError as error:
        return False, f"state_dir: {folder} cannot be used: {error.strerror or error}"
