"""The processes of one engine and their shared memory: ends them and reports how they ended.

Identifies them by process id and start time, so that no other process is taken for one of them. Not
for stopping an engine that still answers; vLLM does that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from hisparsed.engine.plugin import LAUNCHED_ENV
from hisparsed.node.engine.shared_memory import SharedFile, files_there, mapped_by, remove_left

log = logging.getLogger("hisparsed.daemon")


STATE_ENV = "HISPARSED_STATE_DIR"
"""The state folder of the daemon, for the processes that it starts."""
DAEMON_ENV = "HISPARSED_DAEMON"
"""When the daemon started (``started``), for the same."""
COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "nvlink", "fatbinary", "cudafe++", "ninja"}
    | {"gcc", "g++", "cc1", "cc1plus", "clang", "clang++", "as", "ld"}
)
"""Programs that Triton, FlashInfer, DeepGEMM and torch start to compile a kernel."""
_ORPHANS_S = 10.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class EngineProcesses:
    """``roots`` are children of the daemon; ``others`` were started by them."""

    roots: tuple[BaseProcess, ...] = ()
    others: tuple[psutil.Process, ...] = ()
    shared: frozenset[SharedFile] = frozenset()
    """Files in /dev/shm that they have made and mapped."""

    @property
    def killed(self) -> bool:
        """Whether a signal ended a root, not its own error."""
        return any((root.exitcode or 0) < 0 for root in self.roots)

    def exits(self, *, killed: bool = False) -> list[str]:
        """How each root ended, in words; call after it has ended. ``killed``: by the daemon."""
        return [
            f"{one.name} (pid {one.pid}) {exit_text(one.exitcode, killed=killed)}"
            for one in self.roots
        ]

    def compile(self) -> bool:
        """Whether a compiler runs below a root, as at a kernel's first use. Takes milliseconds."""
        for root in self.roots:
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(root.pid).children(recursive=True)
                if any(_name(one) in COMPILERS for one in below):
                    return True
        return False

    def end_within(self, stop_s: float, *, kill: bool = False) -> bool:
        """Wait for their end, or kill at once with ``kill``; kill those that run after ``stop_s``.
        Blocks.

        Returns whether any was killed. Killed processes get the same time again, since the kernel
        must release the pinned memory; those that still run are logged.
        """
        if kill:
            self.kill()
        if self.wait(stop_s):
            return kill
        self.kill()
        if not self.wait(stop_s):
            left = [one.pid for one in self.roots if one.is_alive()]
            left += [one.pid for one in self.others if _holds_memory(one)]
            log.warning(
                "Killed processes of the engine have not ended within %gs and hold memory: %s.",
                stop_s,
                left,
            )
        return True

    def kill(self) -> None:
        """SIGKILL to all that still run."""
        for root in self.roots:
            if root.is_alive():
                root.kill()
        for other in self.others:
            # psutil compares the start time first: another process may have the id by now.
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()

    def wait(self, within_s: float) -> bool:
        """Whether all have ended within this many seconds; blocks."""
        until_s = time.monotonic() + within_s
        for root in self.roots:
            root.join(max(0.0, until_s - time.monotonic()))
        while any(map(_holds_memory, self.others)):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_EVERY_S)
        return not any(root.is_alive() for root in self.roots)

    def free(self) -> list[str]:
        """Remove shared memory that ended processes left and no process holds; the names
        removed.
        """
        return remove_left(self.shared)


class ProcessesSince:
    """The engine's processes: children that multiprocessing began since this was made.

    Call ``look`` repeatedly: processes that begin and end between two calls are not known.
    ``record`` gets their shared memory at every look.
    """

    def __init__(self, record: Callable[[frozenset[SharedFile]], None] = lambda _: None) -> None:
        self._record = record
        self._of_others = files_there()
        self._before = frozenset(one.pid for one in multiprocessing.active_children())
        self._roots: dict[int | None, BaseProcess] = {}
        self._others: dict[psutil.Process, None] = {}
        self._shared: frozenset[SharedFile] = frozenset()

    def look(self) -> EngineProcesses:
        """All processes seen so far. Blocks for some milliseconds."""
        for root in multiprocessing.active_children():
            if root.pid not in self._before:
                self._roots.setdefault(root.pid, root)
        others: list[psutil.Process] = []
        for pid in self._roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                others += psutil.Process(pid).children(recursive=True)
        self._others.update(dict.fromkeys(others))
        pids = [pid for pid in (*self._roots, *(one.pid for one in others)) if pid is not None]
        self._shared = self._shared.union(*map(mapped_by, pids)) - self._of_others
        self._record(self._shared)
        return EngineProcesses(tuple(self._roots.values()), tuple(self._others), self._shared)


def orphans(state_dir: Path) -> list[psutil.Process]:
    """Processes of engines on ``state_dir`` whose daemon has ended.

    An engine ends when its daemon ends, unless it is stopped or stuck in the kernel.
    """
    return [process for process, daemon in _of_engines(state_dir) if daemon is None]


def daemon_on(state_dir: Path) -> int | None:
    """The process id of a daemon whose engine runs on ``state_dir``, whoever has the lock."""
    return next((daemon for _, daemon in _of_engines(state_dir) if daemon is not None), None)


def _of_engines(state_dir: Path) -> Iterator[tuple[psutil.Process, int | None]]:
    """Processes with the process id of their daemon, ``None`` if that has ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            ours = environ.get(LAUNCHED_ENV) == "1" and environ.get(STATE_ENV) == str(state_dir)
            if ours and process.pid != os.getpid() and _holds_memory(process):
                yield process, _daemon_of(process, environ.get(DAEMON_ENV))


def _daemon_of(process: psutil.Process, daemon_started: str | None) -> int | None:
    """A process that loses its parent gets another one, so only a living daemon is found."""
    ancestors = (one.pid for one in process.parents())
    return next((pid for pid in ancestors if started(pid) == (daemon_started or "unknown")), None)


def started(pid: int) -> str:
    """When a process started, in ticks since boot: the same in every PID namespace."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def end_orphans(state_dir: Path) -> list[int]:
    """Kill them; the ids of those that have ended. Blocks."""
    found = orphans(state_dir)
    if found:
        EngineProcesses((), tuple(found)).end_within(_ORPHANS_S, kill=True)
    return [one.pid for one in found if not _holds_memory(one)]


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _holds_memory(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not; a process with threads that are still ending does."""
    try:
        dead = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return not dead and process.is_running()
    except psutil.NoSuchProcess:
        return False


def exit_text(code: int | None, *, killed: bool = False) -> str:
    """How a process ended, by multiprocessing's exit code. ``killed``: by the daemon."""
    if code is None:
        return "still runs"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGTERM:
        return "ended when asked to"
    if -code != signal.SIGKILL:
        return f"was killed by {name}"
    if killed:
        return "was killed by the daemon"
    return f"was killed by {name}; the kernel does that when memory runs out (dmesg)"
