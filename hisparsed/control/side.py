"""The control side put together: what exists before the engine does, and the loop once it does.

For the daemon's life cycle, which decides the order. The socket answers while the engine
starts, so a second daemon is refused before it costs anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hisparsed.control.actions import Operator
from hisparsed.control.announce import Announcer, log
from hisparsed.control.api import ControlApi
from hisparsed.control.board import Board
from hisparsed.control.broadcast import Broadcast
from hisparsed.control.engine_port import EnginePort
from hisparsed.control.journal import Journal
from hisparsed.control.journal_store import Retention
from hisparsed.control.journal_writer import JournalWriter
from hisparsed.control.loop import ControlLoop
from hisparsed.control.metrics import ControlMetrics
from hisparsed.control.overrides import Overrides
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.records import EventKind
from hisparsed.control.socket import ControlServer
from hisparsed.control.status import Lifecycle, NodeInfo
from hisparsed.policy.reasons import Lever
from hisparsed.policy.signals import Admission


@dataclass(frozen=True, slots=True)
class Clocks:
    """``monotonic`` and ``sleep`` belong together; ``wall`` is Unix seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ControlSide:
    """``open``, then ``attach`` and run the loop, then ``close``."""

    source: PolicySource
    overrides: Overrides
    operator: Operator
    board: Board
    metrics: ControlMetrics
    journal: Journal
    announcer: Announcer
    broadcast: Broadcast
    server: ControlServer
    clocks: Clocks

    async def open(self) -> None:
        """Serve the control API and begin the journal. Raises ``UserError``."""
        await self.server.start()
        self.journal.start()

    def attach(
        self,
        engine: EnginePort,
        *,
        set_admission: Callable[[Admission], None],
        live_levers: frozenset[Lever] = frozenset(Lever),
    ) -> ControlLoop:
        """The loop for an engine that runs; ``start`` and ``run`` it."""
        return ControlLoop(
            engine,
            self.source,
            self.overrides,
            self.journal,
            self.announcer,
            self.metrics,
            self.board,
            clock=self.clocks.monotonic,
            wall_clock=self.clocks.wall,
            sleep=self.clocks.sleep,
            set_admission=set_admission,
            live_levers=live_levers,
        )

    async def close(self) -> None:
        """End the event streams and the socket, then write the journal out."""
        if self.board.lifecycle is not Lifecycle.ENGINE_GONE:
            self.board.lifecycle = Lifecycle.STOPPED
        self.announcer.event(EventKind.STOPPED, "The daemon stops.")
        await self.server.stop()
        self.journal.close()


def build_control(
    *,
    node: NodeInfo,
    policy_path: Path,
    socket_path: Path,
    state_dir: Path,
    run: str,
    clocks: Clocks,
    retention: Retention | None = None,
) -> ControlSide:
    """Everything but the loop. ``run`` names this life of the daemon in the journal.

    Opens nothing yet but the policy document. Raises ``ConfigError`` when that is bad.
    """
    source = PolicySource(policy_path, wall_clock=clocks.wall)
    overrides, broadcast, metrics = Overrides(), Broadcast(), ControlMetrics()
    writer = JournalWriter(
        state_dir,
        run=run,
        clock=clocks.monotonic,
        stamp=lambda: datetime.fromtimestamp(clocks.wall(), UTC).strftime("%Y%m%dT%H%M%S"),
        log=lambda sentence: log.warning("%s", sentence),
        retention=retention,
    )
    journal = Journal(writer, run=run)
    announcer = Announcer(journal, broadcast, wall_clock=clocks.wall)
    operator = Operator(source, overrides, announcer)
    board = Board(
        node,
        source,
        overrides,
        journal,
        broadcast,
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
    )
    metrics.bind(board.status)
    api = ControlApi(board, operator, source, journal, broadcast)
    server = ControlServer(api.application(), socket_path, end_streams=broadcast.close)
    return ControlSide(
        source,
        overrides,
        operator,
        board,
        metrics,
        journal,
        announcer,
        broadcast,
        server,
        clocks,
    )
