"""The engine's phases as a state machine: the result of each event, and impossible states."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.config.sections import SupervisionConfig
from hisparsed.control.status.document import EngineState
from hisparsed.node.engine.supervision import (
    AbortStart,
    Action,
    Cleared,
    CutDrain,
    Died,
    Drain,
    Drained,
    End,
    EngineReady,
    Event,
    LaunchEngine,
    Outcome,
    Quarantine,
    RestartAsked,
    RetryDue,
    StartFailed,
    StopAsked,
    Supervision,
    TakeDown,
    Values,
    begin,
    exhausted,
    step,
    wait_s,
)

LIMITS = SupervisionConfig.model_validate(
    {
        "most_restarts": 2,
        "window": "1h",
        "first_wait": "1s",
        "longest_wait": "10s",
        "start_tries": 2,
    }
)
KILLED = Died("killed")


def after(
    events: Iterable[Event], *, limits: SupervisionConfig = LIMITS, now_s: float = 0.0
) -> tuple[Supervision, tuple[Action, ...]]:
    """The state and the last actions after ``events``, all at one time."""
    state, actions = begin(Values.WANTED, now_s)
    for event in events:
        state, actions = step(state, event, now_s, limits)
    return state, actions


def test_a_first_engine_is_started_with_what_the_documents_say() -> None:
    state, actions = begin(Values.WANTED, 5.0)
    assert (state.phase, state.since_s, actions) == (
        EngineState.STARTING,
        5.0,
        (LaunchEngine(Values.WANTED),),
    )


def test_a_first_engine_that_does_not_start_ends_the_daemon_loudly() -> None:
    for refused in (False, True):
        state, actions = after([StartFailed("no", refused)])
        assert (state.phase, actions) == (EngineState.FAILED, (End(Outcome.NEVER_SERVED),))


def test_a_first_engine_that_was_killed_is_tried_again() -> None:
    killed = StartFailed("SIGKILL", killed=True)
    state, actions = after([killed])
    assert (state.phase, state.next_try_s, actions) == (EngineState.RESTARTING, 1.0, ())
    assert after([killed, RetryDue()])[1] == (LaunchEngine(Values.WANTED),)
    assert after([killed, RetryDue(), EngineReady()])[0].tries == 0
    assert after([killed, RetryDue(), killed])[1] == (End(Outcome.NEVER_SERVED),)


def test_a_dead_engine_is_taken_down_and_started_again_with_what_served() -> None:
    state, actions = after([EngineReady(), KILLED])
    assert (state.phase, actions) == (EngineState.RESTARTING, (TakeDown("killed"),))
    state, actions = after([EngineReady(), KILLED, Cleared()])
    assert (state.next_try_s, actions) == (1.0, ())
    state, actions = after([EngineReady(), KILLED, Cleared(), RetryDue()])
    assert (state.phase, actions) == (EngineState.STARTING, (LaunchEngine(Values.GOOD),))


def test_an_engine_that_hangs_is_not_asked_to_stop() -> None:
    assert after([EngineReady(), Died("silent", hangs=True)])[1] == (TakeDown("silent", kill=True),)


def test_each_further_death_waits_twice_as_long_up_to_the_longest() -> None:
    assert [wait_s(ends, LIMITS) for ends in (1, 2, 3, 4, 5, 10_000)] == [1, 2, 4, 8, 10, 10]
    again: list[Event] = [KILLED, Cleared(), RetryDue(), EngineReady()]
    state, _ = after([EngineReady(), *again, KILLED, Cleared()])
    assert state.next_try_s == 2.0


def test_one_death_more_than_allowed_in_the_window_ends_the_daemon() -> None:
    again: list[Event] = [KILLED, Cleared(), RetryDue(), EngineReady()]
    state, actions = after([EngineReady(), *again, *again, KILLED])
    assert (state.phase, actions) == (EngineState.FAILED, (TakeDown("killed"),))
    assert step(state, Cleared(), 0.0, LIMITS)[1] == (End(Outcome.GIVEN_UP),)


def test_deaths_before_the_window_are_forgotten() -> None:
    state, _ = after(
        [
            EngineReady(),
            KILLED,
            Cleared(),
            RetryDue(),
            EngineReady(),
            KILLED,
            Cleared(),
            RetryDue(),
            EngineReady(),
        ]
    )
    assert len(state.ends_s) == 2
    state, _ = step(state, KILLED, 3600.0, LIMITS)
    assert (state.phase, state.ends_s) == (EngineState.RESTARTING, (3600.0,))


def test_no_restart_at_all_can_be_asked_for() -> None:
    limits = LIMITS.model_copy(update={"most_restarts": 0})
    state, _ = after([EngineReady(), KILLED], limits=limits)
    assert state.phase is EngineState.FAILED


def test_a_failed_start_after_a_death_counts_as_one_more() -> None:
    state, actions = after([EngineReady(), KILLED, Cleared(), RetryDue(), StartFailed("no memory")])
    assert (state.phase, state.next_try_s, actions) == (EngineState.RESTARTING, 2.0, ())
    _, actions = after(
        [
            EngineReady(),
            KILLED,
            Cleared(),
            RetryDue(),
            StartFailed("no"),
            RetryDue(),
            StartFailed("no"),
        ]
    )
    assert actions == (End(Outcome.GIVEN_UP),)


def test_a_planned_restart_drains_stops_and_starts_with_the_new_values_at_once() -> None:
    asked = RestartAsked(30.0, changes=True)
    assert after([EngineReady(), asked])[1] == (Drain(30.0),)
    assert after([EngineReady(), asked, Drained()])[1] == (TakeDown(),)
    state, actions = after([EngineReady(), asked, Drained(), Cleared()])
    assert actions == (LaunchEngine(Values.WANTED),)
    assert (state.planned_total, state.ends_s) == (1, ()), "it is no failure"


def test_new_values_that_can_never_start_are_quarantined_at_once() -> None:
    planned: list[Event] = [EngineReady(), RestartAsked(0.0, changes=True), Drained(), Cleared()]
    state, actions = after([*planned, StartFailed("refused", refused=True)])
    assert actions == (Quarantine("refused"), LaunchEngine(Values.GOOD))
    assert state.phase is EngineState.STARTING


def test_new_values_that_do_not_start_are_tried_again_before_they_are_quarantined() -> None:
    planned: list[Event] = [EngineReady(), RestartAsked(0.0, changes=True), Drained(), Cleared()]
    state, actions = after([*planned, StartFailed("no")])
    assert (state.phase, state.next_try_s, actions) == (EngineState.RESTARTING, 1.0, ())
    _, actions = after([*planned, StartFailed("no"), RetryDue()])
    assert actions == (LaunchEngine(Values.WANTED),)
    _, actions = after([*planned, StartFailed("no"), RetryDue(), StartFailed("no")])
    assert actions == (Quarantine("no"), LaunchEngine(Values.GOOD))


def test_new_values_that_served_are_the_good_ones_from_then_on() -> None:
    planned: list[Event] = [
        EngineReady(),
        RestartAsked(0.0, changes=True),
        Drained(),
        Cleared(),
        EngineReady(),
    ]
    _, actions = after([*planned, KILLED, Cleared(), RetryDue()])
    assert actions == (LaunchEngine(Values.GOOD),)


def test_a_restart_without_new_values_quarantines_nothing() -> None:
    planned: list[Event] = [EngineReady(), RestartAsked(0.0, changes=False), Drained(), Cleared()]
    state, actions = after([*planned, StartFailed("no", refused=True)])
    assert (state.phase, actions) == (EngineState.RESTARTING, ())


def test_an_engine_that_dies_while_it_drains_for_a_restart_is_restarted_at_once() -> None:
    limits = LIMITS.model_copy(update={"most_restarts": 0})
    events: list[Event] = [EngineReady(), RestartAsked(30.0, changes=True), KILLED]
    assert after(events, limits=limits)[1] == (TakeDown("killed"),)
    assert after([*events, Cleared()], limits=limits)[1] == (LaunchEngine(Values.WANTED),)


def test_somebody_who_asks_while_the_next_try_is_waited_for_gets_it_at_once() -> None:
    waiting: list[Event] = [EngineReady(), KILLED, Cleared()]
    state, actions = after([*waiting, RestartAsked(0.0, changes=False)])
    assert (state.phase, actions) == (EngineState.STARTING, (LaunchEngine(Values.GOOD),))


@pytest.mark.parametrize(
    "busy",
    [
        [],
        [EngineReady(), RestartAsked(1.0, changes=False)],
        [EngineReady(), KILLED],
        [EngineReady(), StopAsked(1.0)],
    ],
    ids=["starting", "draining", "taken down", "stopping"],
)
def test_a_restart_asked_for_elsewhere_changes_nothing(busy: list[Event]) -> None:
    state, _ = after(busy)
    assert step(state, RestartAsked(9.0, changes=True), 1.0, LIMITS) == (state, ())


def test_a_stop_drains_and_a_second_one_does_not_wait() -> None:
    assert after([EngineReady(), StopAsked(30.0)])[1] == (Drain(30.0),)
    assert after([EngineReady(), StopAsked(30.0), StopAsked(30.0)])[1] == (CutDrain(),)
    assert after([EngineReady(), StopAsked(30.0), Drained()])[1] == (TakeDown(),)
    assert after([EngineReady(), StopAsked(30.0), Drained(), Cleared()])[1] == (
        End(Outcome.STOPPED),
    )


def test_a_stop_takes_over_the_drain_of_a_restart_with_its_own_limit() -> None:
    events: list[Event] = [EngineReady(), RestartAsked(600.0, changes=True), StopAsked(30.0)]
    assert after(events)[1] == (Drain(30.0),)
    assert after([*events, Drained(), Cleared()])[1] == (End(Outcome.STOPPED),)


def test_a_stop_while_an_engine_starts_ends_the_start() -> None:
    assert after([StopAsked(30.0)])[1] == (AbortStart(),)
    assert after([StopAsked(30.0), StartFailed("told")])[1] == (End(Outcome.STOPPED),)
    late: list[Event] = [StopAsked(30.0), EngineReady()]
    assert after(late)[1] == (TakeDown(),), "it was too late to end the start"
    assert after([*late, Cleared()])[1] == (End(Outcome.STOPPED),)


def test_a_stop_while_no_engine_is_there_ends_at_once() -> None:
    assert after([EngineReady(), KILLED, Cleared(), StopAsked(30.0)])[1] == (End(Outcome.STOPPED),)
    taking_down: list[Event] = [EngineReady(), KILLED, StopAsked(30.0)]
    assert after(taking_down)[1] == ()
    assert after([*taking_down, Cleared()])[1] == (End(Outcome.STOPPED),)


def test_an_engine_that_dies_while_the_daemon_stops_is_not_started_again() -> None:
    events: list[Event] = [EngineReady(), StopAsked(30.0), KILLED]
    assert after([*events, Cleared()])[1] == (End(Outcome.GIVEN_UP),)


EVENTS = st.one_of(
    st.just(EngineReady()),
    st.builds(StartFailed, st.just("no"), st.booleans()),
    st.builds(Died, st.just("killed"), st.booleans()),
    st.just(Cleared()),
    st.just(Drained()),
    st.just(RetryDue()),
    st.builds(RestartAsked, st.floats(0, 60), st.booleans()),
    st.builds(StopAsked, st.floats(0, 60)),
)


class Shell:
    """Answers actions as the real one does, so that only events which can come do."""

    def __init__(self) -> None:
        self.starting = self.running = self.draining = self.clearing = False

    def takes(self, event: Event, state: Supervision) -> bool:
        match event:
            case EngineReady() | StartFailed():
                return self.starting
            case Died():
                return self.running and not self.clearing
            case Cleared():
                return self.clearing
            case Drained():
                return self.draining
            case RetryDue():
                return state.next_try_s is not None
        return True

    def took(self, event: Event) -> None:
        match event:
            case EngineReady():
                self.starting, self.running = False, True
            case StartFailed():
                self.starting = False
            case Cleared():
                self.clearing = self.running = False
            case Drained():
                self.draining = False

    def does(self, action: Action) -> None:
        match action:
            case LaunchEngine():
                assert not self.starting, "two engines start at a time"
                assert not self.running, "two engines at a time"
                self.starting = True
            case AbortStart():
                assert self.starting
            case Drain() | CutDrain():
                assert self.running
                self.draining = True
            case TakeDown():
                assert self.running
                assert not self.clearing, "taken down twice"
                self.clearing, self.draining = True, False
            case End():
                assert not self.starting, "a start goes on"
                assert not self.running, "an engine is left behind"


@given(st.lists(st.tuples(EVENTS, st.floats(0, 4000))))
def test_whatever_comes_there_is_one_engine_at_most_and_none_is_left(
    moves: list[tuple[Event, float]],
) -> None:
    shell, now_s, ended = Shell(), 0.0, False
    state, actions = begin(Values.WANTED, now_s)
    launches, unplanned = 0, 0
    for action in actions:
        shell.does(action)
    for event, passed_s in moves:
        if not shell.takes(event, state):
            continue
        now_s += passed_s
        shell.took(event)
        before = state
        state, actions = step(state, event, now_s, LIMITS)
        assert not ended or actions == (), "something is done after the end"
        for action in actions:
            shell.does(action)
            launches += isinstance(action, LaunchEngine)
            ended = ended or isinstance(action, End)
        unplanned += isinstance(event, Died)
        assert state.since_s >= before.since_s
        if state.phase is EngineState.SERVING:
            assert shell.running
            assert state.values is Values.GOOD
        if state.next_try_s is not None:
            assert state.phase is EngineState.RESTARTING
            assert now_s < state.next_try_s <= now_s + LIMITS.longest_wait
        if state.phase in (EngineState.STARTING, EngineState.SERVING) and not state.planned:
            assert not exhausted(state, LIMITS)
    assert state.died_total == unplanned


@given(st.lists(st.tuples(EVENTS, st.floats(0, 4000))))
def test_whatever_came_a_stop_ends_the_daemon_in_a_few_turns(
    moves: list[tuple[Event, float]],
) -> None:
    shell, now_s = Shell(), 0.0
    state, actions = begin(Values.WANTED, now_s)
    for action in actions:
        shell.does(action)
    turn: list[Event] = [StartFailed("told"), Drained(), Cleared()]
    answers: list[Event] = [StopAsked(1.0), StopAsked(1.0), *turn, *turn]
    ended = False
    for event, passed_s in [*moves, *((one, 0.0) for one in answers)]:
        if ended or not shell.takes(event, state):
            continue
        now_s += passed_s
        shell.took(event)
        state, actions = step(state, event, now_s, LIMITS)
        for action in actions:
            shell.does(action)
            ended = ended or isinstance(action, End)
    assert ended, state
