"""Reports the engine's state: events, the service manager's status, and what a restart would do.

Decides nothing: the supervisor passes in what has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.config.sections import SupervisionConfig
from hisparsed.control.events import DAEMON, EventRecorder
from hisparsed.control.status.document import EngineEnd, EngineState
from hisparsed.node.engine.supervision import Died, Supervision
from hisparsed.node.service import ServiceManager
from hisparsed.policy.events import EventKind
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.units import counted, format_duration


def plan_sentence(
    calls: int,
    drain_s: float,
    changes: Sequence[PendingRestart],
    left: Sequence[PendingRestart],
    last_start_s: float | None,
) -> str:
    """The effect of a restart, shown before it is confirmed."""
    if drain_s > 0:
        limit = format_duration(drain_s)
        first = f"New calls get 503; the {calls} that are open get {limit} to end, then 503 too."
    else:
        first = f"The {calls} calls that are open are cut off with 503, and new ones get it too."
    took = f" The last start took {last_start_s:.0f}s." if last_start_s is not None else ""
    new = f"with {pending_text(changes)}" if changes else "with its present values"
    rest = f" Only a restart of the daemon changes {keys_text(left)}." if left else ""
    return f"{first} Then the engine stops and starts {new}.{took} Cached prefixes are lost.{rest}"


def pending_text(changes: Sequence[PendingRestart]) -> str:
    return ", ".join(f"{one.key} {one.wanted} (was {one.running})" for one in changes)


def keys_text(changes: Sequence[PendingRestart]) -> str:
    return ", ".join(one.key for one in changes)


@dataclass(frozen=True)
class EngineReporter:
    """``url`` is where clients ask."""

    recorder: EventRecorder
    manager: ServiceManager
    limits: SupervisionConfig
    url: str
    restart_within_s: float
    """The longest time for a stop and a start."""

    def entered(self, state: Supervision, *, drain_s: float = 0.0) -> None:
        """A phase began; ``drain_s`` is how long a stop may drain."""
        match state.phase:
            case EngineState.SERVING:
                self.manager.ready(f"Serving on {self.url}")
            case EngineState.DRAINING if state.stopping:
                self.manager.stopping("Draining", within_s=drain_s)
            case EngineState.RESTARTING:
                within_s = self.restart_within_s
                self.manager.restarting("Restarting the engine", within_s=within_s)

    def died(self, event: Died, state: Supervision) -> None:
        what = "hangs" if event.hangs else "died"
        if state.phase is EngineState.FAILED:
            then = self._given_up(state)
        else:
            then = "It is stopped and restarted; calls get 503 meanwhile."
        self._event(EventKind.ENGINE_DIED, f"The engine {what}: {event.why}. {then}")

    def cleared(self, end: EngineEnd, wait_s: float | None) -> None:
        """An engine that ended unasked is gone; the next is started in ``wait_s``."""
        how = "; ".join(end.processes) or "it had no process left"
        kept = f"Evidence: {end.evidence}" if end.evidence else "The evidence could not be written"
        then = f" The engine is started in {_rounded(wait_s)}." if wait_s is not None else ""
        self._event(EventKind.ENGINE_RESTARTING, f"Taken down: {how}. {kept}.{then}")

    def start_failed(self, why: str, wait_s: float | None) -> None:
        then = f" It is tried again in {_rounded(wait_s)}." if wait_s is not None else ""
        self._event(EventKind.ENGINE_START_FAILED, f"The engine did not start: {why}.{then}")

    def ready(self, took_s: float, changes: tuple[PendingRestart, ...], actor: str) -> None:
        new = f" Now in force: {pending_text(changes)}." if changes else ""
        took = format_duration(max(1, round(took_s)))
        self._event(EventKind.ENGINE_READY, f"The engine serves after {took}.{new}", actor=actor)

    def restart_begun(self, sentence: str, actor: str) -> None:
        said = f"{actor} restarts the engine. {sentence}"
        self._event(EventKind.ENGINE_RESTARTING, said, actor=actor)

    def quarantined(self, why: str, changes: tuple[PendingRestart, ...], actor: str) -> None:
        self._event(
            EventKind.ENGINE_QUARANTINED,
            f"The engine does not start with {pending_text(changes) or 'these values'}: {why}. "
            "They are quarantined, and the last good values are started again.",
            actor=actor,
        )

    def starts_with_good(self, changes: tuple[PendingRestart, ...], why: str) -> None:
        """A daemon was started with values that are known not to start an engine."""
        self._event(
            EventKind.ENGINE_QUARANTINED,
            f"{pending_text(changes)} did not start an engine before ({why}), so the last good "
            "values are started. `hisparsed engine restart` tries them again.",
        )

    def given_up(self, state: Supervision) -> None:
        self._event(EventKind.ENGINE_GONE, f"The engine is gone. {self._given_up(state)}")

    def stopped(self, cut: int) -> None:
        words = f"Stopped; cut off {counted(cut, 'call')}." if cut else "Stopped; all calls ended."
        self._event(EventKind.STOPPED, words)

    def _given_up(self, state: Supervision) -> str:
        if state.stopping:
            return "It died while the daemon drained; the daemon ends."
        window = format_duration(self.limits.window)
        return (
            f"{len(state.ends_s)} ends within {window} are more than supervision.most_restarts "
            f"{self.limits.most_restarts} allows; the daemon ends."
        )

    def _event(self, kind: EventKind, sentence: str, *, actor: str = DAEMON) -> None:
        self.recorder.event(kind, sentence, actor=actor)


def _rounded(seconds: float) -> str:
    return format_duration(round(seconds, 1))
