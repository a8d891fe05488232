"""Tells of each turn of the engine's life: events, lifecycle, the service manager, the gate.

One place for the words that operators read. Decides nothing; it is told what has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparsed.config.supervision import SupervisionConfig
from hisparsed.control.announce import DAEMON, Announcer
from hisparsed.control.board import Board
from hisparsed.control.records import EventKind
from hisparsed.control.status import Lifecycle
from hisparsed.control.status_engine import EngineEnd, EngineState
from hisparsed.daemon.gate import Gate
from hisparsed.daemon.notify import ServiceManager
from hisparsed.daemon.refusal import Refusal
from hisparsed.daemon.supervision import Died, Supervision
from hisparsed.daemon.supervisor_view import changes_text
from hisparsed.policy.restart import PendingRestart
from hisparsed.policy.units import format_duration


@dataclass(frozen=True)
class EngineNews:
    """``away`` is what clients are told while no call can start; ``url`` is where they ask."""

    announcer: Announcer
    board: Board
    manager: ServiceManager
    gate: Gate
    limits: SupervisionConfig
    away: Callable[[], Refusal]
    url: str
    restart_within_s: float
    """The longest that taking down and starting may take."""

    def entered(self, state: Supervision, *, drain_s: float = 0.0) -> None:
        """A phase began; ``drain_s`` is how long a stop may drain."""
        board, manager = self.board, self.manager
        match state.phase:
            case EngineState.STARTING:
                board.lifecycle = Lifecycle.RESTARTING if state.served else Lifecycle.STARTING
            case EngineState.SERVING:
                board.lifecycle = Lifecycle.SERVING
                self.gate.open()
                manager.ready(f"Serving on {self.url}")
            case EngineState.DRAINING if state.stopping:
                board.lifecycle = Lifecycle.DRAINING
                self.gate.drain()
                manager.stopping("Draining", within_s=drain_s)
            case EngineState.DRAINING:
                board.lifecycle = Lifecycle.DRAINING
                self.gate.close(self.away)
            case EngineState.RESTARTING:
                board.lifecycle = Lifecycle.RESTARTING
                self.gate.close(self.away)
                manager.restarting("Restarting the engine", within_s=self.restart_within_s)
            case EngineState.FAILED:
                board.lifecycle = Lifecycle.ENGINE_GONE
                self.gate.drain()
            case EngineState.STOPPED:
                board.lifecycle = Lifecycle.STOPPED
                self.gate.drain()

    def died(self, event: Died, state: Supervision) -> None:
        what = "hangs" if event.hangs else "died"
        if state.phase is EngineState.FAILED:
            then = self._given_up(state)
        else:
            then = "It is taken down and started anew; calls get 503 meanwhile."
        self._tell(EventKind.ENGINE_DIED, f"The engine {what}: {event.why}. {then}")

    def cleared(self, end: EngineEnd, wait_s: float | None) -> None:
        """An engine that ended unasked is gone; the next is started in ``wait_s``."""
        how = "; ".join(end.processes) or "it had no process left"
        kept = f"Evidence: {end.evidence}" if end.evidence else "The evidence could not be written"
        then = f" The engine is started in {_rounded(wait_s)}." if wait_s is not None else ""
        self._tell(EventKind.ENGINE_RESTARTING, f"Taken down: {how}. {kept}.{then}")

    def start_failed(self, why: str, wait_s: float | None) -> None:
        then = f" It is tried again in {_rounded(wait_s)}." if wait_s is not None else ""
        self._tell(EventKind.ENGINE_START_FAILED, f"The engine did not start: {why}.{then}")

    def ready(self, took_s: float, changes: tuple[PendingRestart, ...], actor: str) -> None:
        new = f" Now in force: {changes_text(changes)}." if changes else ""
        took = format_duration(max(1, round(took_s)))
        self._tell(EventKind.ENGINE_READY, f"The engine serves after {took}.{new}", actor=actor)

    def restart_begun(self, sentence: str, actor: str) -> None:
        said = f"{actor} restarts the engine. {sentence}"
        self._tell(EventKind.ENGINE_RESTARTING, said, actor=actor)

    def quarantined(self, why: str, changes: tuple[PendingRestart, ...], actor: str) -> None:
        self._tell(
            EventKind.ENGINE_QUARANTINED,
            f"The engine does not start with {changes_text(changes) or 'these values'}: {why}. "
            "They are put aside, and the last good values are started again.",
            actor=actor,
        )

    def starts_with_good(self, changes: tuple[PendingRestart, ...], why: str) -> None:
        """A daemon was started with values that are known not to start an engine."""
        self._tell(
            EventKind.ENGINE_QUARANTINED,
            f"{changes_text(changes)} did not start an engine before ({why}), so the last good "
            "values are started. `hisparsed engine restart` tries them again.",
        )

    def given_up(self, state: Supervision) -> None:
        self._tell(EventKind.ENGINE_GONE, f"The engine is gone. {self._given_up(state)}")

    def stopped(self, cut: int) -> None:
        words = f"Stopped; {cut} calls were cut off." if cut else "Stopped; all calls ended."
        self._tell(EventKind.STOPPED, words)

    def _given_up(self, state: Supervision) -> str:
        if state.stopping:
            return "It died while the daemon drained; the daemon ends."
        window = format_duration(self.limits.window)
        return (
            f"{len(state.ends_s)} ends within {window} are more than supervision.most_restarts "
            f"{self.limits.most_restarts} allows; the daemon ends."
        )

    def _tell(self, kind: EventKind, sentence: str, *, actor: str = DAEMON) -> None:
        self.announcer.event(kind, sentence, actor=actor)


def _rounded(seconds: float) -> str:
    return format_duration(round(seconds, 1))
