"""The doctor's checks: each a function of one picture of the machine and the node's document.

``CHECKS`` is the list; a further check is a function and a line in it. Nothing here looks at the
machine or changes it. What holds for CUDA nodes only says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hisparsed.config.kind import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.operations.findings import Finding, Severity
from hisparsed.operations.known_faults import KnownFaults, concerning, parse_version
from hisparsed.operations.machine import Machine
from hisparsed.policy.units import format_bytes

GIB = 2**30
LEFT_FOR_SYSTEM = 0.05
"""Share of the memory that should stay for the engine's processes and the system."""
GPU_IDLE_BYTES = 2 * GIB
"""Used memory of a GPU beyond which another program is on it."""
NUMA_IMBALANCE = 2.0
SUPPORTED_VLLM = "0.30"


@dataclass(frozen=True, slots=True)
class Question:
    """One examination: what a node wants of a machine."""

    config: NodeConfig
    document: Path
    document_unix_s: float
    """When the document was last written."""
    kind: NodeKind
    machine: Machine
    faults: KnownFaults

    @property
    def pins(self) -> bool:
        return self.kind == "cuda"


Check = Callable[[Question], Iterator[Finding]]


def examine(question: Question) -> list[Finding]:
    """Every check has at least one finding, in the order of ``CHECKS``."""
    findings = []
    for name, (check, well) in CHECKS.items():
        found = list(check(question))
        findings += found or [Finding(name, Severity.OK, well)]
    return findings


def memory(q: Question) -> Iterator[Finding]:
    budget, total, free = q.config.host_budget, q.machine.memory_bytes, q.machine.available_bytes
    why = "the host budget is taken once at start; what is short then is taken from everything else"
    if budget > total:
        what = f"host_budget {format_bytes(budget)} is more than {format_bytes(total)} of memory"
        fix = "lower host_budget, or raise the memory limit of the service or container"
        yield Finding("memory", Severity.FATAL, what, why, fix)
    elif budget > free:
        what = f"host_budget {format_bytes(budget)}, but only {format_bytes(free)} are free"
        fix = "end what holds memory (see leaked-memory), or lower host_budget"
        yield Finding("memory", Severity.FATAL, what, why, fix)
    elif budget > total * (1 - LEFT_FOR_SYSTEM):
        what = f"host_budget {format_bytes(budget)} leaves under 5% of {format_bytes(total)}"
        yield Finding("memory", Severity.WARNING, what, why, "lower host_budget")


def shared_memory(q: Question) -> Iterator[Finding]:
    ranks = q.config.engine_args.get("tensor_parallel_size", 1)
    if not q.pins or ranks == 1:
        return
    budget, free = q.config.host_budget, q.machine.shm_free_bytes
    if budget > free:
        total = format_bytes(q.machine.shm_total_bytes)
        yield Finding(
            "shared-memory",
            Severity.FATAL,
            f"host_budget {format_bytes(budget)}, but /dev/shm has {format_bytes(free)} of {total}",
            "the ranks of a node share one pool, which vLLM keeps in /dev/shm",
            "mount -o remount,size=95% /dev/shm; in a container give it that size",
        )


def leaked_memory(q: Question) -> Iterator[Finding]:
    for file in q.machine.offload_files:
        size = format_bytes(file.size_bytes)
        if file.held:
            continue
        if file.held is None:
            what = f"{file.path} holds {size}, and the kernel does not say for whom"
            fix = "run this as the file's owner or root; remove it when no engine runs"
        else:
            what = f"{file.path} holds {size} of an engine that is dead"
            fix = "hisparsed doctor --fix"
        why = "memory in /dev/shm outlives the engine; after some crashes none is left for a start"
        yield Finding("leaked-memory", Severity.WARNING, what, why, fix)


def dead_daemon(q: Question) -> Iterator[Finding]:
    if q.machine.dead_folder is not None:
        what = f"{q.machine.dead_folder} is of a daemon that was killed"
        why = "its sockets are nobody's any more; the next start removes it too"
        yield Finding("dead-daemon", Severity.NOTE, what, why, "hisparsed doctor --fix")


def memlock(q: Question) -> Iterator[Finding]:
    limit = q.machine.memlock_bytes
    if q.pins and limit is not None and limit < q.config.host_budget:
        yield Finding(
            "memlock",
            Severity.FATAL,
            f"this user may lock {format_bytes(limit)}, host_budget is "
            f"{format_bytes(q.config.host_budget)}",
            "the host budget is pinned, which counts as locked memory",
            "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited in a shell or container",
        )


def kernel(q: Question) -> Iterator[Finding]:
    if q.pins:
        for fault in concerning(q.faults.kernel, q.machine.kernel, q.config):
            what = f"Linux {q.machine.kernel}: {fault.title}"
            yield Finding("kernel", Severity(fault.severity), what, fault.links, fault.fix)


def driver(q: Question) -> Iterator[Finding]:
    if q.pins and q.machine.driver is not None:
        for fault in concerning(q.faults.driver, q.machine.driver, q.config):
            what = f"NVIDIA driver {q.machine.driver}: {fault.title}"
            yield Finding("driver", Severity(fault.severity), what, fault.links, fault.fix)


def numa(q: Question) -> Iterator[Finding]:
    free = q.machine.numa_free_bytes
    if q.pins and len(free) > 1 and max(free) > NUMA_IMBALANCE * max(1, min(free)):
        text = ", ".join(format_bytes(one) for one in free)
        yield Finding(
            "numa",
            Severity.WARNING,
            f"free memory differs between NUMA nodes: {text}",
            "the pool then lies mostly on one socket, and half of the GPUs read it across",
            "end what fills one node, drop its page cache, or start with numactl --interleave=all",
        )


def huge_pages(q: Question) -> Iterator[Finding]:
    if q.pins and q.machine.huge_pages == "never":
        yield Finding(
            "huge-pages",
            Severity.NOTE,
            "transparent huge pages are off",
            "a pin takes longer with small pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def gpus(q: Question) -> Iterator[Finding]:
    if not q.pins:
        return
    wanted = int(q.config.engine_args.get("tensor_parallel_size", 1))
    found = q.machine.gpus
    if len(found) < wanted:
        yield Finding(
            "gpus",
            Severity.FATAL,
            f"tensor_parallel_size is {wanted}, but {len(found)} GPUs can be seen",
            "the engine gives up after minutes of starting",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or lower tensor_parallel_size",
        )
    for index, gpu in enumerate(found):
        if gpu.processes or gpu.used_bytes > GPU_IDLE_BYTES:
            yield Finding(
                "gpus",
                Severity.WARNING,
                f"GPU {index} ({gpu.name}) is in use: {format_bytes(gpu.used_bytes)} by "
                f"{gpu.processes} processes",
                "the engine takes what is free and may find too little for the model",
                f"nvidia-smi -i {index}; end what should not be there",
            )


def ports(q: Question) -> Iterator[Finding]:
    if q.machine.daemon_answers:
        return  # they are the running daemon's, see daemon
    for sentence in q.machine.taken_ports:
        yield Finding("ports", Severity.FATAL, sentence, "nobody could reach the node")


def daemon(q: Question) -> Iterator[Finding]:
    if q.machine.daemon_answers:
        yield Finding(
            "daemon",
            Severity.FATAL,
            f"a daemon serves on {q.config.control_socket}",
            "a second one would need memory, ports and GPUs of the first",
            "nothing, if you only wanted to look; else systemctl stop hisparsed",
        )
    elif q.machine.state_trouble is not None:
        yield Finding("daemon", Severity.FATAL, q.machine.state_trouble)


def vllm(q: Question) -> Iterator[Finding]:
    found = q.machine.vllm
    fix = "pip install 'hisparsed[cuda]', or 'hisparsed[cpu]' for the reference node"
    version = parse_version(found) if found is not None else None
    if found is None or version is None:
        yield Finding("vllm", Severity.FATAL, "vLLM is not installed", "it runs the model", fix)
        return
    lowest = parse_version(SUPPORTED_VLLM)
    if lowest is not None and version < lowest:
        what = f"vLLM {found} is older than {SUPPORTED_VLLM}"
        yield Finding("vllm", Severity.FATAL, what, "Hybrid HiSparse came with it", fix)
    if q.pins:
        for fault in concerning(q.faults.vllm, found, q.config):
            what = f"vLLM {found}: {fault.title}"
            yield Finding("vllm", Severity(fault.severity), what, fault.links, fault.fix)


def journal_disk(q: Question) -> Iterator[Finding]:
    wanted, free = q.config.journal.max_size, q.machine.disk_free_bytes
    if free < wanted:
        yield Finding(
            "journal-disk",
            Severity.WARNING,
            f"{q.config.state_dir}: {format_bytes(free)} free, the journal may take "
            f"{format_bytes(wanted)}",
            "a full disk stops the journal; requests go on, but no decision is kept",
            "free some space, or lower journal.max_size",
        )


def clock(q: Question) -> Iterator[Finding]:
    if q.machine.unix_s < q.document_unix_s:
        yield Finding(
            "clock",
            Severity.WARNING,
            f"the clock is behind the last change of {q.document}",
            "schedules and values set for a time go by it, and the journal's times too",
            "timedatectl set-ntp true",
        )
    elif q.machine.clock_kept is False:
        yield Finding(
            "clock",
            Severity.NOTE,
            "nothing keeps the clock right",
            "schedules and the journal go by it",
            "timedatectl set-ntp true",
        )


CHECKS: dict[str, tuple[Check, str]] = {
    "memory": (memory, "the host budget fits into memory"),
    "shared-memory": (shared_memory, "shared memory is large enough"),
    "leaked-memory": (leaked_memory, "no memory of dead engines"),
    "dead-daemon": (dead_daemon, "nothing left of dead daemons"),
    "memlock": (memlock, "the host budget may be locked"),
    "kernel": (kernel, "no known fault of this kernel"),
    "driver": (driver, "no known fault of this driver"),
    "numa": (numa, "memory is balanced between NUMA nodes"),
    "huge-pages": (huge_pages, "huge pages are as wanted"),
    "gpus": (gpus, "GPUs are there and idle, as far as this node needs them"),
    "ports": (ports, "ports are free"),
    "daemon": (daemon, "no other daemon"),
    "vllm": (vllm, "vLLM is there, with no known fault for this node"),
    "journal-disk": (journal_disk, "room for the journal"),
    "clock": (clock, "the clock is kept"),
}
"""By name: the check, and what is said where it finds nothing."""
