"""What steers a simulated node: the daemon's own control loop in virtual time, or stock vLLM.

Nothing of the loop is rebuilt here: its clock, its sleep and its engine are passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hisparsed import __version__
from hisparsed.control.announce import Announcer
from hisparsed.control.board import Board, TickOutcome
from hisparsed.control.broadcast import Broadcast
from hisparsed.control.journal import Journal
from hisparsed.control.journal_writer import JournalWriter
from hisparsed.control.loop import ControlLoop
from hisparsed.control.metrics import ControlMetrics
from hisparsed.control.overrides import Overrides
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.status import NodeInfo
from hisparsed.engine.messages import EngineCommand
from hisparsed.engine.simulated.node import SimulatedNode
from hisparsed.policy.signals import Admission


class ControlSide(Protocol):
    """Told once a tick of virtual time to look and act."""

    admission: Admission | None
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

    admission: Admission | None = None
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
        self.admission: Admission | None = None
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
        overrides, broadcast = Overrides(), Broadcast()
        info = NodeInfo(
            kind="simulated",
            model=title,
            version=__version__,
            api_url="",
            pid=0,
            started_unix_s=clock.unix_s(),
        )
        board = Board(
            info,
            self._source,
            overrides,
            self._journal,
            broadcast,
            clock=clock.now_s,
            wall_clock=clock.unix_s,
        )
        board.watchers.append(watch)
        self._loop = ControlLoop(
            node,
            self._source,
            overrides,
            self._journal,
            Announcer(self._journal, broadcast, wall_clock=clock.unix_s),
            ControlMetrics(),
            board,
            clock=clock.now_s,
            wall_clock=clock.unix_s,
            sleep=asyncio.sleep,
            set_admission=self._set_admission,
        )
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

    def _set_admission(self, admission: Admission) -> None:
        self.admission = admission
