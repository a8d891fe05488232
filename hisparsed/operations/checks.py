"""The doctor's checks and their findings: severity, meaning, remedy, as text and JSON.

Each check is a function of one picture of the machine and the node document. ``CHECKS`` is the
list; a new check is a function and a line in it. Nothing here looks at the machine or changes it.
Checks for CUDA nodes only ask first for ``pins`` or the kind.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.status.document import Severity
from hisparsed.engine.compat.features import missing_features
from hisparsed.engine.compat.versions import (
    OVERRIDE_HINT,
    WHY_TESTED,
    Standing,
    judge_version,
    overridden,
    supported_text,
)
from hisparsed.engine.cuda.checks import largest_pool, shared_pool_bytes
from hisparsed.engine.cuda.proof.kept import FILE_NAME as PROOFS_FILE
from hisparsed.engine.cuda.proof.verdict import chunks_problem, judge_hot
from hisparsed.operations.known_faults import KnownFaults, concerning
from hisparsed.operations.machine import Machine
from hisparsed.policy.units import counted, format_bytes

EXIT_SOUND = 0
EXIT_WARNINGS = 1
EXIT_FATAL = 3
"""2 means wrong input, as for every command."""
_WIDTH = 100
_LEAST_WIDTH = 40
_INDENT = " " * 24


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """A stable name for scripts, such as `memlock`."""
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    fixed: bool = False
    """Was fixed just now."""


def exit_code(findings: Sequence[Finding], *, fatal_only: bool) -> int:
    """0 sound, 1 warnings, 3 fatal; fixed findings do not count."""
    open_ones = {one.severity for one in findings if not one.fixed}
    if Severity.FATAL in open_ones:
        return EXIT_FATAL
    if Severity.WARNING in open_ones and not fatal_only:
        return EXIT_WARNINGS
    return EXIT_SOUND


def findings_document(findings: Sequence[Finding], *, node: str) -> dict[str, Any]:
    """For machines; keys are stable."""
    counts = {
        severity.value: sum(one.severity is severity and not one.fixed for one in findings)
        for severity in Severity
    }
    return {"node": node, "counts": counts, "findings": [asdict(one) for one in findings]}


def findings_text(
    findings: Sequence[Finding], *, node: str, every: bool, width: int = _WIDTH
) -> str:
    """For people: the worst first, with reason and fix; ``every`` also lists checks that passed.

    What is longer than ``width`` continues below itself.
    """
    order = list(reversed(Severity))
    lines = []
    for one in sorted(findings, key=lambda one: (one.fixed, order.index(one.severity))):
        if one.severity is Severity.OK and not every:
            continue
        word = "fixed" if one.fixed else one.severity.value
        lines += _below(f"{word:8} {one.check:14} ", one.what, width)
        lines += _below(f"{_INDENT}why: ", one.why, width) if one.why else []
        lines += _below(f"{_INDENT}fix: ", one.fix, width) if one.fix and not one.fixed else []
    return "\n".join([*lines, _summary(findings, node)]) + "\n"


def _below(start: str, text: str, width: int) -> list[str]:
    """``text`` after ``start`` and, if it is longer, in the same column below."""
    first, *more = textwrap.wrap(
        text,
        max(width - len(start), _LEAST_WIDTH),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [start + first, *(" " * len(start) + line for line in more)]


def _summary(findings: Sequence[Finding], node: str) -> str:
    def count(severity: Severity) -> int:
        return sum(one.severity is severity and not one.fixed for one in findings)

    fixed = sum(one.fixed for one in findings)
    put_right = f", {fixed} fixed" if fixed else ""
    return (
        f"{node}: {counted(len({one.check for one in findings}), 'check')}, "
        f"{count(Severity.FATAL)} fatal, {counted(count(Severity.WARNING), 'warning')}{put_right}."
    )


GIB = 2**30
LEFT_FOR_SYSTEM = 0.05
"""Share of the memory that should stay for the engine's processes and the system."""
PROCESS_BYTES = 512 * 2**20
"""The least memory of one process with vLLM, without weights and pools."""
LEAST_LEFT_BYTES = 512 * 2**20
LEAST_SHARED_LEFT_BYTES = 256 * 2**20
LEAST_LEFT = 0.02
"""Share of the memory below which a node that runs may lose a process."""
MOST_LEFT = 0.1
"""Share of a small memory above which ``LEAST_LEFT_BYTES`` would be too much."""
GPU_IDLE_BYTES = 2 * GIB
"""Used memory of a GPU beyond which another program is on it."""
NUMA_IMBALANCE = 2.0


@dataclass(frozen=True, slots=True)
class Examination:
    """The input of one examination: the node's document and the machine."""

    config: NodeConfig
    document: Path
    document_unix_s: float
    """When the document was last written."""
    kind: NodeKind
    machine: Machine
    faults: KnownFaults
    start_problems: tuple[str, ...] = ()
    """Problems that the node's own start would refuse, except memory and GPUs."""
    kind_problem: str | None = None
    """Why the node cannot be of ``kind`` here; the other checks assume that it can."""

    @property
    def pins(self) -> bool:
        return self.kind == "cuda"


Check = Callable[[Examination], Iterator[Finding]]


def examine(
    question: Examination, checks: Mapping[str, tuple[Check, str]] | None = None
) -> list[Finding]:
    """Every check has at least one finding, in the order of ``checks`` (``CHECKS``)."""
    findings = []
    for name, (check, well) in (CHECKS if checks is None else checks).items():
        found = list(check(question))
        findings += found or [Finding(name, Severity.OK, well)]
    return findings


def node(q: Examination) -> Iterator[Finding]:
    if q.kind_problem is not None:
        yield Finding("node", Severity.FATAL, q.kind_problem, "the node's start refuses it too")


def memory(q: Examination) -> Iterator[Finding]:
    budget, total, free = q.config.host_budget, q.machine.memory_bytes, q.machine.available_bytes
    most = largest_pool(free) if q.pins else free
    why = "the host budget is allocated once at start, at the expense of everything else"
    if budget > total:
        what = f"host_budget {format_bytes(budget)} is more than {format_bytes(total)} of memory"
        fix = "lower host_budget, or raise the memory limit of the service or container"
        yield Finding("memory", Severity.FATAL, what, why, fix)
    elif budget > free:
        what = f"host_budget {format_bytes(budget)}, but only {format_bytes(free)} are free"
        yield Finding("memory", Severity.FATAL, what, why, _MORE_MEMORY)
    elif budget > most:
        what = f"host_budget {format_bytes(budget)}, but {format_bytes(free)} are free"
        why = f"vLLM takes at most {format_bytes(most)} of it, and the node's start is refused"
        yield Finding("memory", Severity.FATAL, what, why, _MORE_MEMORY)
    elif free - budget < own_bytes(q):
        what = (
            f"host_budget {format_bytes(budget)} leaves {format_bytes(free - budget)} of the "
            f"{format_bytes(free)} that are free"
        )
        why = f"the node's own processes take {format_bytes(own_bytes(q))}, and one would be ended"
        yield Finding("memory", Severity.FATAL, what, why, _MORE_MEMORY)
    elif free - budget < margin_bytes(q):
        what = (
            f"host_budget {format_bytes(budget)} leaves {format_bytes(free - budget)} of the "
            f"{format_bytes(free)} that are free"
        )
        why = f"the node and the system need about {format_bytes(margin_bytes(q))} in addition"
        yield Finding("memory", Severity.WARNING, what, why, "lower host_budget")


_MORE_MEMORY = "free memory (see leaked-memory, huge-pages), or lower host_budget"


def own_bytes(q: Examination) -> int:
    """The least memory of the daemon, the engine core and its ranks themselves."""
    ranks = q.config.cuda.tensor_parallel_size if q.pins else 1
    return PROCESS_BYTES * (1 + ranks)


def margin_bytes(q: Examination) -> int:
    """Memory that should stay free in addition to the host budget."""
    return max(int(q.machine.memory_bytes * LEFT_FOR_SYSTEM), 2 * own_bytes(q))


def shared_memory(q: Examination) -> Iterator[Finding]:
    pool, free = shared_pool_bytes(q.config) if q.pins else 0, q.machine.shm_free_bytes
    if pool > free:
        total = format_bytes(q.machine.shm_total_bytes)
        yield Finding(
            "shared-memory",
            Severity.FATAL,
            f"host_budget {format_bytes(pool)}, but /dev/shm has {format_bytes(free)} of {total}",
            "the ranks of a node share one pool, which vLLM keeps in /dev/shm",
            _MORE_SHARED_MEMORY,
        )
    elif pool and free - pool < _queue_bytes(q):
        yield Finding(
            "shared-memory",
            Severity.WARNING,
            f"host_budget {format_bytes(pool)} leaves {format_bytes(free - pool)} of /dev/shm",
            f"vLLM's queues between the ranks may take {format_bytes(_queue_bytes(q))} of it, and "
            "a rank that finds none left is ended by SIGBUS",
            _MORE_SHARED_MEMORY,
        )


_MORE_SHARED_MEMORY = "mount -o remount,size=95% /dev/shm; in a container give it that size"


def _queue_bytes(q: Examination) -> int:
    """Length of vLLM's queues: ten messages of 16 MiB to all ranks, ten of 24 MiB of each."""
    return 10 * (16 + 24 * q.config.cuda.tensor_parallel_size) * 2**20


def shared_memory_left(q: Examination) -> Iterator[Finding]:
    free = q.machine.shm_free_bytes
    if q.pins and shared_pool_bytes(q.config) and free < LEAST_SHARED_LEFT_BYTES:
        yield Finding(
            "shared-memory-left",
            Severity.WARNING,
            f"{format_bytes(free)} of {format_bytes(q.machine.shm_total_bytes)} of /dev/shm are "
            "left",
            "a rank whose queue finds none left is ended by SIGBUS, and the engine with it",
            f"see what fills it: ls -lS /dev/shm, leaked-memory; then {_MORE_SHARED_MEMORY}",
        )


def leaked_memory(q: Examination) -> Iterator[Finding]:
    for file in q.machine.shared_files:
        size = format_bytes(file.size_bytes)
        if file.held:
            continue
        if file.held is None:
            what = f"{file.path} holds {size}, and the kernel does not say for whom"
            fix = "run this as the file's owner or root; remove it while no engine runs"
        else:
            what = f"{file.path} holds {size} of an engine that is dead"
            fix = "hisparsed doctor --fix"
        why = "memory in /dev/shm outlives the engine; after some crashes none is left for a start"
        yield Finding("leaked-memory", Severity.WARNING, what, why, fix)


def dead_daemon(q: Examination) -> Iterator[Finding]:
    if q.machine.dead_folder is not None:
        what = f"{q.machine.dead_folder} is of a daemon that was killed"
        why = "its sockets are unused; the next start removes it too"
        yield Finding("dead-daemon", Severity.NOTE, what, why, "hisparsed doctor --fix")
    if q.machine.dead_socket is not None:
        what = f"{q.machine.dead_socket} is the control socket of a daemon that was killed"
        why = "no process answers on it; the next start removes it too"
        yield Finding("dead-daemon", Severity.NOTE, what, why, "hisparsed doctor --fix")


def orphans(q: Examination) -> Iterator[Finding]:
    for one in q.machine.orphans:
        yield Finding(
            "orphans",
            Severity.WARNING,
            f"{one.pid} ({one.name}) is a process of an engine whose daemon was killed",
            "it holds the memory of its pools; the next start ends it too",
            "hisparsed doctor --fix",
        )


def memlock(q: Examination) -> Iterator[Finding]:
    limit = q.machine.memlock_bytes
    # NVIDIA's driver pins with the kernel's get_user_pages and counts nothing as locked:
    # os_lock_user_pages in NVIDIA/open-gpu-kernel-modules, kernel-open/nvidia/os-mlock.c. A second
    # registration of the pool, such as by RDMA, does count.
    if q.pins and limit is not None and limit < q.config.host_budget:
        yield Finding(
            "memlock",
            Severity.WARNING,
            f"this user may lock {format_bytes(limit)}, host_budget is "
            f"{format_bytes(q.config.host_budget)}",
            "NVIDIA's open driver pins memory without counting it as locked, so the node starts; "
            "RDMA and mlock count it, and would fail",
            "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited in a shell or container",
        )


def kernel(q: Examination) -> Iterator[Finding]:
    if q.pins:
        for fault in concerning(q.faults.kernel, q.machine.kernel, q.config):
            what = f"Linux {q.machine.kernel}: {fault.title}"
            yield Finding("kernel", Severity(fault.severity), what, fault.links, fault.fix)


def driver(q: Examination) -> Iterator[Finding]:
    if q.pins and q.machine.driver is not None:
        for fault in concerning(q.faults.driver, q.machine.driver, q.config):
            what = f"NVIDIA driver {q.machine.driver}: {fault.title}"
            yield Finding("driver", Severity(fault.severity), what, fault.links, fault.fix)


def numa(q: Examination) -> Iterator[Finding]:
    free = q.machine.numa_free_bytes
    if q.pins and len(free) > 1 and max(free) > NUMA_IMBALANCE * max(1, min(free)):
        text = ", ".join(format_bytes(one) for one in free)
        yield Finding(
            "numa",
            Severity.WARNING,
            f"free memory differs between NUMA nodes: {text}",
            "the pool is then mostly on one socket, and half of the GPUs read it across",
            "end the processes that fill one node, drop its page cache, or start with numactl "
            "--interleave=all",
        )


def huge_pages(q: Examination) -> Iterator[Finding]:
    reserved, unused = q.machine.huge_reserved_bytes, q.machine.huge_free_bytes
    if reserved:
        short = q.machine.available_bytes - q.config.host_budget < margin_bytes(q)
        yield Finding(
            "huge-pages",
            Severity.WARNING if short and unused else Severity.NOTE,
            f"{format_bytes(reserved)} are reserved as huge pages, {format_bytes(unused)} unused",
            "neither the host budget nor the engine can use them",
            "sysctl vm.nr_hugepages=0, and take hugepages= off the kernel's command line",
        )
    if q.pins and q.machine.huge_pages == "never":
        yield Finding(
            "huge-pages",
            Severity.NOTE,
            "transparent huge pages are off",
            "a pin takes longer with small pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def gpus(q: Examination) -> Iterator[Finding]:
    if not q.pins:
        return
    wanted = q.config.cuda.tensor_parallel_size
    found = q.machine.gpus
    none_is_told = q.kind_problem is not None and not found
    if len(found) < wanted and not none_is_told:
        yield Finding(
            "gpus",
            Severity.FATAL,
            f"cuda.tensor_parallel_size is {wanted}, but {len(found)} GPUs can be seen",
            "the engine gives up after minutes of starting",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or lower cuda.tensor_parallel_size",
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


def gpu_clocks(q: Examination) -> Iterator[Finding]:
    for index, gpu in enumerate(q.machine.gpus):
        if q.pins and gpu.slowed_by:
            yield Finding(
                "gpu-clocks",
                Severity.WARNING,
                f"GPU {index} ({gpu.name}) is slowed down by {' and '.join(gpu.slowed_by)}",
                "ranks wait for the slowest GPU, so the whole node decodes at its pace",
                f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {index}; check cooling and power",
            )


def kernels(q: Examination) -> Iterator[Finding]:
    proofs, cuda = q.machine.proofs, q.config.cuda
    if not q.pins or not proofs:
        return
    why = "vLLM's kernels run with one size of hot buffers, so the multiplier needs a restart"
    again = f"remove {q.config.state_dir / PROOFS_FILE} to check them again"
    verdict = judge_hot(proofs, cuda.kernels_max_ratio)
    asked = any(one.hot is not None for one in proofs)
    if cuda.kernels != "vllm" and q.machine.kernels_doubt is not None:
        yield Finding("kernels", Severity.WARNING, q.machine.kernels_doubt, why, again)
    elif cuda.kernels != "vllm" and asked and not verdict.ours:
        fix = f"report it; {again}, or set cuda.kernels: vllm"
        yield Finding("kernels", Severity.WARNING, verdict.because, why, fix)
    problem = chunks_problem(proofs)
    if problem is not None:
        what = f"copies of indexer chunks: {problem}"
        lost = "nothing is lent to the offload pool, and prefixes are lost with their GPU blocks"
        yield Finding("kernels", Severity.WARNING, what, lost, f"report it; {again}")


def memory_left(q: Examination) -> Iterator[Finding]:
    total, free = q.machine.memory_bytes, q.machine.available_bytes
    if free < max(total * LEAST_LEFT, min(LEAST_LEFT_BYTES, total * MOST_LEFT)):
        yield Finding(
            "memory-left",
            Severity.WARNING,
            f"{format_bytes(free)} of {format_bytes(total)} of memory are left",
            "when it runs out the system ends a process, often the engine",
            "see what grows: top -o %MEM, leaked-memory; or lower host_budget at the next restart",
        )


def engine(q: Examination) -> Iterator[Finding]:
    for problem in q.start_problems:
        yield Finding("engine", Severity.FATAL, problem, "the node's start refuses it too")


def ports(q: Examination) -> Iterator[Finding]:
    if q.machine.daemon_answers:
        return  # they are the running daemon's, see daemon
    for sentence in q.machine.taken_ports:
        yield Finding("ports", Severity.FATAL, sentence, "no client could reach the node")


def daemon(q: Examination) -> Iterator[Finding]:
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


def vllm(q: Examination) -> Iterator[Finding]:
    found = q.machine.vllm
    fix = "pip install 'hisparsed[cuda]', or 'hisparsed[cpu]' for the reference node"
    if found is None:
        yield Finding("vllm", Severity.FATAL, "vLLM is not installed", "it runs the model", fix)
        return
    verdict = judge_version(found)
    if verdict.standing is not Standing.TESTED:
        starts = verdict.may_start or overridden(q.config.allow_untested_vllm, os.environ)
        severity = Severity.WARNING if starts else Severity.FATAL
        tested = f"{fix} brings one of {supported_text()}. {OVERRIDE_HINT}"
        yield Finding("vllm", severity, verdict.sentence, WHY_TESTED, tested)
    for sentence in missing_features(q.config, found):
        yield Finding("vllm", Severity.FATAL, sentence, "the node's start refuses it too")
    if q.pins:
        for fault in concerning(q.faults.vllm, found, q.config):
            what = f"vLLM {found}: {fault.title}"
            yield Finding("vllm", Severity(fault.severity), what, fault.links, fault.fix)


def journal_disk(q: Examination) -> Iterator[Finding]:
    free = q.machine.disk_free_bytes
    wanted = q.config.journal.max_size - q.machine.journal_bytes
    if free < wanted:
        yield Finding(
            "journal-disk",
            Severity.WARNING,
            f"{q.config.state_dir}: {format_bytes(free)} free, the journal may take "
            f"{format_bytes(wanted)} more",
            "a full disk stops the journal; requests continue, but decisions are not recorded",
            "free some space, or lower journal.max_size",
        )


def clock(q: Examination) -> Iterator[Finding]:
    if q.machine.unix_s < q.document_unix_s:
        yield Finding(
            "clock",
            Severity.WARNING,
            f"the clock is behind the last change of {q.document}",
            "schedules, values set for a time and the journal use it",
            "timedatectl set-ntp true",
        )
    elif q.machine.clock_kept is False:
        yield Finding(
            "clock",
            Severity.NOTE,
            "the clock is not synchronised",
            "schedules and the journal use it",
            "timedatectl set-ntp true",
        )


CHECKS: dict[str, tuple[Check, str]] = {
    "node": (node, "this machine can run a node of this kind"),
    "memory": (memory, "the host budget fits into memory"),
    "shared-memory": (shared_memory, "shared memory is large enough"),
    "leaked-memory": (leaked_memory, "no memory of dead engines"),
    "dead-daemon": (dead_daemon, "nothing left of dead daemons"),
    "orphans": (orphans, "no engine without a daemon"),
    "memlock": (memlock, "the host budget may be locked"),
    "kernel": (kernel, "no known fault of this kernel"),
    "driver": (driver, "no known fault of this driver"),
    "numa": (numa, "memory is balanced between NUMA nodes"),
    "huge-pages": (huge_pages, "huge pages are set as recommended"),
    "gpus": (gpus, "the GPUs that this node needs are present and idle"),
    "gpu-clocks": (gpu_clocks, "no GPU is slowed down by heat or power supply"),
    "kernels": (kernels, "no check of kernels or copies failed on these GPUs"),
    "engine": (engine, "model, engine arguments and hot buffers are compatible"),
    "ports": (ports, "ports are free"),
    "daemon": (daemon, "no other daemon"),
    "vllm": (vllm, "vLLM is installed, with no known fault for this node"),
    "journal-disk": (journal_disk, "room for the journal"),
    "clock": (clock, "the clock is synchronised"),
}
"""By name: the check, and the text if it finds nothing."""

WHILE_RUNNING: dict[str, tuple[Check, str]] = {
    "memory-left": (memory_left, "memory is left in addition to the node"),
    "shared-memory-left": (shared_memory_left, "shared memory is left in addition to the pool"),
    **{
        name: CHECKS[name]
        for name in ("leaked-memory", "gpu-clocks", "kernels", "journal-disk", "clock")
    },
}
"""Checks whose result can change, and matters, while the node runs."""
