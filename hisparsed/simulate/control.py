"""The controls of a simulated node: the daemon's control loop or stock vLLM, and the API's
admission.

The control loop is the daemon's own; its clock, its sleep and its engine are passed in. Admission
follows the daemon's: running sessions are never held, calls beyond the context limit take turns.
The driver decides what a client does after a refusal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hisparsed import __version__
from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.loop import ControlLoop, ControlPlane
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.status.current import CurrentStatus, StatusSources, TickOutcome
from hisparsed.control.status.document import NodeInfo
from hisparsed.engine.simulated.node import SimulatedNode
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import AdmissionRules

Item = TypeVar("Item")


class Arrival(Enum):
    """The outcome for a call that arrives."""

    SEND = auto()
    HELD = auto()
    """Later, by ``due``."""
    REFUSED = auto()
    """429: it may come again after ``retry_after_s``."""
    TOO_LONG = auto()
    """400 for its length: coming again would not help."""


@dataclass(frozen=True, slots=True)
class ReleasedCalls(Generic[Item]):
    """Calls that are no longer held."""

    send: list[Item]
    refused: list[Item]


class SimulatedAdmission(Generic[Item]):
    """``admission`` of ``None`` lets all pass."""

    def __init__(self) -> None:
        self._new: deque[tuple[float, Item]] = deque()
        self._long: deque[Item] = deque()
        self._long_running: Item | None = None

    def arrive(
        self,
        item: Item,
        *,
        tokens: int,
        new_session: bool,
        admission: AdmissionRules | None,
        waiting: int,
        now_s: float,
    ) -> Arrival:
        """``tokens``: prompt and asked answer. ``waiting``: calls that wait in the engine."""
        if admission is None:
            return Arrival.SEND
        longest = admission.max_context_tokens
        if longest is not None and tokens > longest:
            return self._arrive_long(item, admission)
        limit = admission.max_waiting_sessions
        if limit is None or not new_session or (_has_room(waiting, limit) and not self._new):
            return Arrival.SEND
        if admission.when_full == "refuse":
            return Arrival.REFUSED
        self._new.append((now_s, item))
        return Arrival.HELD

    def _arrive_long(self, item: Item, admission: AdmissionRules) -> Arrival:
        if admission.over_max_context == "refuse":
            return Arrival.TOO_LONG
        if self._long_running is None:
            self._long_running = item
            return Arrival.SEND
        self._long.append(item)
        return Arrival.HELD

    def due(
        self, admission: AdmissionRules | None, waiting: int, now_s: float
    ) -> ReleasedCalls[Item]:
        """Held calls whose turn has come, and those that were held for ``max_wait_s``."""
        found: ReleasedCalls[Item] = ReleasedCalls([], [])
        limit = None if admission is None else admission.max_waiting_sessions
        while self._new:
            since_s, item = self._new[0]
            if limit is None or _has_room(waiting + len(found.send), limit):
                found.send.append(item)
            elif admission is not None and now_s - since_s >= admission.max_wait_s:
                found.refused.append(item)
            else:
                break
            self._new.popleft()
        if self._long and self._long_running is None:
            self._long_running = self._long.popleft()
            found.send.append(self._long_running)
        return found

    def finished(self, item: Item) -> None:
        """A call has ended; the next long one may begin."""
        if item is self._long_running:
            self._long_running = None


def _has_room(waiting: int, limit: int) -> bool:
    """Where nothing waits, everybody starts."""
    return waiting == 0 or waiting < limit


class ControlSide(Protocol):
    """Told once per tick of virtual time to look and act."""

    admission: AdmissionRules | None
    """What the API side enforces; ``None`` admits all."""

    def start(self) -> None: ...
    def tick(self) -> None: ...

    @property
    def tick_s(self) -> float: ...

    @property
    def journal_lost(self) -> int:
        """Records that are in no file though there is one."""
        ...

    def close(self) -> None: ...


class StaticControl:
    """Stock vLLM: one command at the start or none, and nothing after it."""

    admission: AdmissionRules | None = None
    tick_s = 1.0
    journal_lost = 0

    def __init__(self, node: SimulatedNode, command: EngineCommand | None) -> None:
        self._node = node
        self._command = command

    def start(self) -> None:
        if self._command is not None:
            self._node.put(self._command)

    def tick(self) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing is open."""


class LoopControl:
    """The control loop under the policy at ``path``; a journal in ``journal_folder``.

    ``watch`` sees every finished tick.
    """

    def __init__(
        self,
        node: SimulatedNode,
        path: Path,
        *,
        run: str,
        title: str,
        journal_folder: Path | None,
        watch: Callable[[TickOutcome], None],
    ) -> None:
        clock = node.clock
        self.admission: AdmissionRules | None = None
        self._source = PolicySource(path, clock=clock.now_s, wall_clock=clock.unix_s)
        self._journal = Journal(
            JournalWriter(
                journal_folder or Path(),
                run=run,
                clock=clock.now_s,
                stamp=lambda: f"{clock.unix_s():.0f}",
                log=lambda _sentence: None,
            ),
            run=run,
        )
        self._writes = journal_folder is not None
        holds, broadcast = Holds(), Broadcast()
        recorder = EventRecorder(self._journal, broadcast, wall_clock=clock.unix_s)
        info = NodeInfo(
            kind="simulated",
            model=title,
            version=__version__,
            api_url="",
            pid=0,
            started_unix_s=clock.unix_s(),
        )
        status = CurrentStatus(
            info,
            self._source,
            holds,
            self._journal,
            broadcast,
            StatusSources(on_tick=lambda: (watch,)),
            clock=clock.now_s,
            wall_clock=clock.unix_s,
        )
        plane = ControlPlane(
            self._source,
            holds,
            self._journal,
            broadcast,
            recorder,
            status,
            ControlMetrics(status.status),
            clock=clock.now_s,
            wall_clock=clock.unix_s,
        )
        self._loop = ControlLoop(node, plane, set_admission=self._set_admission)
        self._runner = asyncio.Runner()

    @property
    def tick_s(self) -> float:
        return self._source.in_force.policy.tick

    @property
    def journal_lost(self) -> int:
        return self._journal.health.dropped if self._writes else 0

    def start(self) -> None:
        if self._writes:
            self._journal.start()
        self._runner.run(self._loop.start())

    def tick(self) -> None:
        self._runner.run(self._loop.tick())

    def close(self) -> None:
        self._runner.close()
        if self._writes:
            self._journal.close()

    def _set_admission(self, admission: AdmissionRules) -> None:
        self.admission = admission
