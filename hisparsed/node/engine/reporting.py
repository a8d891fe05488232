"""Reports the engine's life: status document, events, service manager, open or closed API.

One place for the words that operators and clients read. Decides nothing: the supervisor says what
has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hisparsed.config.sections import SupervisionConfig
from hisparsed.control.events import DAEMON, Announcer
from hisparsed.control.status.current import Board
from hisparsed.control.status.document import (
    EngineEnd,
    EngineLifeStatus,
    EngineState,
    Lifecycle,
    QuarantinedValues,
)
from hisparsed.node.engine.records import PutAside
from hisparsed.node.engine.supervision import Died, Supervision
from hisparsed.node.openai.admission import Gate
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.service import ServiceManager
from hisparsed.policy.events import EventKind
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.units import format_duration


def engine_status(
    state: Supervision,
    limits: SupervisionConfig,
    *,
    now_s: float,
    now_unix_s: float,
    why: str,
    served: int,
    last_start_s: float | None,
    last_end: EngineEnd | None,
    put_aside: PutAside | None,
    changes: Sequence[PendingRestart],
) -> EngineLifeStatus:
    """``why``: what led to there being no engine; ``served``: engines that ever did."""
    quarantined = None
    if put_aside is not None:
        quarantined = QuarantinedValues(
            at_unix_s=put_aside.at_unix_s, error=put_aside.error, changes=list(changes)
        )
    next_try_unix_s = None
    if state.next_try_s is not None:
        next_try_unix_s = now_unix_s + state.next_try_s - now_s
    return EngineLifeStatus(
        state=state.phase,
        since_unix_s=now_unix_s + state.since_s - now_s,
        sentence=_sentence(state, limits, now_s, why),
        died_total=state.died_total,
        restarts_total=max(0, served - 1),
        planned_restarts_total=state.planned_total,
        ends_in_window=sum(now_s - at_s < limits.window for at_s in state.ends_s),
        most_restarts=limits.most_restarts,
        last_start_s=last_start_s,
        next_try_unix_s=next_try_unix_s,
        last_exit=last_end,
        quarantined=quarantined,
    )


def _sentence(state: Supervision, limits: SupervisionConfig, now_s: float, why: str) -> str:
    since = format_duration(max(0, round(now_s - state.since_s)))
    after = f" after: {why}" if why else ""
    match state.phase:
        case EngineState.STARTING:
            return f"the engine has been starting for {since}{after}"
        case EngineState.SERVING:
            return f"the engine has served for {since}"
        case EngineState.DRAINING:
            what = "the daemon stops" if state.stopping else "the engine is restarted"
            return f"open calls end, for {since} now, before {what}"
        case EngineState.RESTARTING if state.next_try_s is not None:
            left = format_duration(max(0, round(state.next_try_s - now_s)))
            tries = f"{len(state.ends_s)} of {limits.most_restarts} restarts used"
            return f"no engine{after}; the next try comes in {left} ({tries})"
        case EngineState.RESTARTING:
            return f"the engine is being taken down{after}"
        case EngineState.FAILED:
            return f"the engine is given up{after}; the daemon ends"
        case _:
            return "the daemon stops"


def away_words(state: Supervision) -> str:
    """For clients: why no call can start. Says nothing of what the operator has to know."""
    if state.phase is EngineState.STARTING and not state.served:
        return "this node's engine is starting; retry in a while, or elsewhere"
    return "this node's engine is being restarted; retry in a while, or elsewhere"


def plan_sentence(
    calls: int,
    drain_s: float,
    changes: Sequence[PendingRestart],
    left: Sequence[PendingRestart],
    last_start_s: float | None,
) -> str:
    """What a restart does, before somebody confirms it."""
    if drain_s > 0:
        limit = format_duration(drain_s)
        first = f"New calls get 503; the {calls} that are open get {limit} to end, then 503 too."
    else:
        first = f"The {calls} calls that are open are cut off with 503, and new ones get it too."
    took = f" The last start took {last_start_s:.0f}s." if last_start_s is not None else ""
    new = f"with {changes_text(changes)}" if changes else "with the values that it runs with now"
    rest = f" Only a restart of the daemon changes {keys_text(left)}." if left else ""
    return f"{first} Then the engine stops and starts {new}.{took} Cached prefixes are lost.{rest}"


def changes_text(changes: Sequence[PendingRestart]) -> str:
    return ", ".join(f"{one.key} {one.wanted} (was {one.running})" for one in changes)


def keys_text(changes: Sequence[PendingRestart]) -> str:
    return ", ".join(one.key for one in changes)


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
