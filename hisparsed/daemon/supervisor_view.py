"""What people and programs are told of the engine's life: the status document's part, sentences.

Pure. Not here: events and their times, which the supervisor tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from hisparsed.config.supervision import SupervisionConfig
from hisparsed.control.status_engine import (
    EngineEnd,
    EngineLifeStatus,
    EngineState,
    QuarantinedValues,
)
from hisparsed.daemon.engine_record import PutAside
from hisparsed.daemon.supervision import Supervision
from hisparsed.policy.restart import PendingRestart
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
