"""The engine's phases as a state machine: events in, actions out, time passed in.

Decides when an engine is started, drained, stopped, restarted or given up, and with which values.
Pure: it starts nothing, waits for nothing and reads no clock; ``supervisor`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hisparsed.config.sections import SupervisionConfig
from hisparsed.control.status.document import EngineState


class Values(StrEnum):
    """Which settings an engine is started with."""

    WANTED = "wanted"
    """The values of the documents now."""
    GOOD = "good"
    """Values that an engine last served with."""


class Outcome(StrEnum):
    """How the daemon ends."""

    STOPPED = "stopped"
    NEVER_SERVED = "never-served"
    GIVEN_UP = "given-up"


# --- events ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine that was started serves."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Nothing of the engine is left. ``refused``: these values can never start. ``killed``: a
    signal ended one of its processes, so the same may start the next time."""

    why: str
    refused: bool = False
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Died:
    """The engine ended, hangs or stalled; its processes are not removed yet."""

    why: str
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine and all it held are gone."""


@dataclass(frozen=True, slots=True)
class Drained:
    """No call is open, or the drain time has ended."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The time of the next try has come."""


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """``changes``: the documents differ from the engine's values."""

    drain_s: float
    changes: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A second one ends the draining."""

    drain_s: float


Event = EngineReady | StartFailed | Died | Cleared | Drained | RetryDue | RestartAsked | StopAsked


# --- actions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaunchEngine:
    """Start an engine; ends in ``EngineReady`` or ``StartFailed``."""

    values: Values


@dataclass(frozen=True, slots=True)
class AbortStart:
    """End the start in progress; ends in ``StartFailed``, or too late in ``EngineReady``."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let no call start and wait for those that are open; ends in ``Drained``."""

    within_s: float


@dataclass(frozen=True, slots=True)
class CutDrain:
    """Wait no longer for open calls; ends in ``Drained``."""


@dataclass(frozen=True, slots=True)
class TakeDown:
    """Cut open calls, stop the engine, free what it held; ends in ``Cleared``.

    ``why`` is set if it was not requested; then the evidence is written. ``kill``: it hangs, so it
    is not asked to stop.
    """

    why: str | None = None
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Quarantine the wanted values, with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class End:
    """The daemon ends. The last action."""

    outcome: Outcome


Action = LaunchEngine | AbortStart | Drain | CutDrain | TakeDown | Quarantine | End


# --- the machine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Supervision:
    """``begin`` makes the first one; times are values of ``now_s`` that were passed to ``step``."""

    phase: EngineState
    since_s: float
    values: Values
    """The number of the engine that runs or is started next."""
    served: bool = False
    """Whether any engine of this daemon has served."""
    ends_s: tuple[float, ...] = ()
    """When engines ended or failed to start unasked, within the window; newest last."""
    tries: int = 0
    """Failed starts of the first engine, or with wanted values since they were requested."""
    died_total: int = 0
    planned_total: int = 0
    """Restarts that were requested and begun."""
    next_try_s: float | None = None
    planned: bool = False
    """Whether the next engine's start was requested."""
    stopping: bool = False


Step = tuple[Supervision, tuple[Action, ...]]


def begin(values: Values, now_s: float) -> Step:
    return Supervision(EngineState.STARTING, now_s, values), (LaunchEngine(values),)


def wait_s(ends: int, limits: SupervisionConfig) -> float:
    """How long to wait for the next try after this many ends in the window, 1 or more."""
    # Repeated doubling would overflow a float long after the cap is reached.
    return min(limits.first_wait * 2.0 ** min(ends - 1, 60), limits.longest_wait)


def step(state: Supervision, event: Event, now_s: float, limits: SupervisionConfig) -> Step:
    """The next state and the actions for ``event``. An event that has no meaning in a phase changes
    nothing."""
    match event, state.phase:
        case EngineReady(), EngineState.STARTING:
            return _serving(state, now_s)
        case EngineReady(), EngineState.STOPPED:
            return state, (TakeDown(),)
        case StartFailed(), EngineState.STARTING:
            return _start_failed(state, event, now_s, limits)
        case StartFailed(), EngineState.STOPPED:
            return state, (End(Outcome.STOPPED),)
        case Died(), EngineState.SERVING | EngineState.DRAINING:
            return _died(state, event, now_s, limits)
        case RestartAsked(), EngineState.SERVING:
            return _plan(state, event, now_s)
        case RestartAsked(), EngineState.RESTARTING if state.next_try_s is not None:
            return _launch(_planned(state, event), now_s)
        case Drained(), EngineState.DRAINING:
            phase = EngineState.STOPPED if state.stopping else EngineState.RESTARTING
            return _to(state, phase, now_s), (TakeDown(),)
        case RetryDue(), EngineState.RESTARTING if state.next_try_s is not None:
            return _launch(state, now_s)
        case Cleared(), _:
            return _cleared(state, now_s, limits)
        case StopAsked(), _:
            return _stop(state, event, now_s)
    return state, ()


def exhausted(state: Supervision, limits: SupervisionConfig) -> bool:
    """Whether there were more ends within the window than restarts are allowed."""
    return len(state.ends_s) > limits.most_restarts


def _to(state: Supervision, phase: EngineState, now_s: float) -> Supervision:
    return replace(state, phase=phase, since_s=now_s, next_try_s=None)


def _launch(state: Supervision, now_s: float) -> Step:
    return _to(state, EngineState.STARTING, now_s), (LaunchEngine(state.values),)


def _serving(state: Supervision, now_s: float) -> Step:
    # The values that it was started with are the good ones from now on.
    state = replace(state, values=Values.GOOD, served=True, tries=0, planned=False)
    return _to(state, EngineState.SERVING, now_s), ()


def _counted(state: Supervision, now_s: float, limits: SupervisionConfig) -> Supervision:
    recent = tuple(at_s for at_s in state.ends_s if now_s - at_s < limits.window)
    return replace(state, ends_s=(*recent, now_s))


def _start_failed(
    state: Supervision, event: StartFailed, now_s: float, limits: SupervisionConfig
) -> Step:
    if not state.served:
        state = replace(state, tries=state.tries + 1)
        if event.killed and state.tries < limits.start_tries:
            return _wait(state, now_s, wait_s(state.tries, limits)), ()
        return _to(state, EngineState.FAILED, now_s), (End(Outcome.NEVER_SERVED),)
    if state.values is Values.WANTED:
        state = replace(state, tries=state.tries + 1)
        if event.refused or state.tries >= limits.start_tries:
            state = replace(state, values=Values.GOOD, tries=0, planned=False)
            return _to(state, EngineState.STARTING, now_s), (
                Quarantine(event.why),
                LaunchEngine(Values.GOOD),
            )
        return _wait(state, now_s, wait_s(state.tries, limits)), ()
    state = _counted(state, now_s, limits)
    if exhausted(state, limits):
        return _to(state, EngineState.FAILED, now_s), (End(Outcome.GIVEN_UP),)
    return _wait(state, now_s, wait_s(len(state.ends_s), limits)), ()


def _wait(state: Supervision, now_s: float, for_s: float) -> Supervision:
    return replace(_to(state, EngineState.RESTARTING, now_s), next_try_s=now_s + for_s)


def _died(state: Supervision, event: Died, now_s: float, limits: SupervisionConfig) -> Step:
    state = _counted(replace(state, died_total=state.died_total + 1), now_s, limits)
    phase = EngineState.RESTARTING
    # An engine that dies during a requested restart does not end the daemon.
    if state.stopping or (exhausted(state, limits) and not state.planned):
        phase = EngineState.FAILED
    return _to(state, phase, now_s), (TakeDown(event.why, event.hangs),)


def _planned(state: Supervision, event: RestartAsked) -> Supervision:
    return replace(
        state,
        values=Values.WANTED if event.changes else Values.GOOD,
        tries=0,
        planned=True,
        planned_total=state.planned_total + 1,
    )


def _plan(state: Supervision, event: RestartAsked, now_s: float) -> Step:
    return _to(_planned(state, event), EngineState.DRAINING, now_s), (Drain(event.drain_s),)


def _cleared(state: Supervision, now_s: float, limits: SupervisionConfig) -> Step:
    match state.phase:
        case EngineState.FAILED:
            return state, (End(Outcome.GIVEN_UP),)
        case EngineState.STOPPED:
            return state, (End(Outcome.STOPPED),)
        case EngineState.RESTARTING if state.next_try_s is None:
            if state.planned:
                return _launch(state, now_s)
            return _wait(state, now_s, wait_s(len(state.ends_s), limits)), ()
    return state, ()


def _stop(state: Supervision, event: StopAsked, now_s: float) -> Step:
    match state.phase:
        case EngineState.STARTING:
            return _to(replace(state, stopping=True), EngineState.STOPPED, now_s), (AbortStart(),)
        case EngineState.SERVING:
            state = replace(state, stopping=True, planned=False)
            return _to(state, EngineState.DRAINING, now_s), (Drain(event.drain_s),)
        case EngineState.DRAINING if state.stopping:
            return state, (CutDrain(),)
        case EngineState.DRAINING:
            # The drain in progress belongs to the restart; the stop has its own limit.
            state = replace(state, stopping=True, planned=False)
            return state, (Drain(event.drain_s),)
        case EngineState.RESTARTING if state.next_try_s is not None:
            return _to(replace(state, stopping=True), EngineState.STOPPED, now_s), (
                End(Outcome.STOPPED),
            )
        case EngineState.RESTARTING:
            return _to(replace(state, stopping=True), EngineState.STOPPED, now_s), ()
    return state, ()
