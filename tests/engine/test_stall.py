"""What is tried, and when, where nothing runs though something waits and memory is free."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hisparsed.engine.stall import Remedy, StallLimits, StallWatch, StepFacts

IDLE = StepFacts(0.0, running=0, waiting=3, scheduled_tokens=0, transfers=False, paused=False)
LIMITS = StallLimits(after_s=1.0, between_s=0.25, give_up_after_s=5.0)


def at(now_s: float, facts: StepFacts = IDLE) -> StepFacts:
    return replace(facts, now_s=now_s)


def play(watch: StallWatch, until_s: float, facts: StepFacts = IDLE) -> list[Remedy]:
    remedies = [watch.step(at(tick / 100, facts)) for tick in range(round(until_s * 100))]
    return [remedy for remedy in remedies if remedy is not None]


def test_from_harmless_to_costly_each_call_at_the_head_once() -> None:
    watch = StallWatch(LIMITS)
    assert play(watch, 4.9) == [
        Remedy.LIFT_LIMIT,
        Remedy.NEXT_IN_LINE,
        Remedy.NEXT_IN_LINE,
        Remedy.NEXT_IN_LINE,
        Remedy.FORGET_PREFIX,
    ]
    assert watch.counts.found == 1


def test_a_lone_call_is_not_moved_behind_itself() -> None:
    remedies = play(StallWatch(LIMITS), 4.0, replace(IDLE, waiting=1))
    assert remedies == [Remedy.LIFT_LIMIT, Remedy.FORGET_PREFIX]


def test_the_head_fails_last_and_the_next_one_gets_all_remedies_again() -> None:
    watch = StallWatch(LIMITS)
    remedies = play(watch, 11.0, replace(IDLE, waiting=1))
    assert remedies == [
        Remedy.LIFT_LIMIT,
        Remedy.FORGET_PREFIX,
        Remedy.GIVE_UP,
        Remedy.LIFT_LIMIT,
        Remedy.FORGET_PREFIX,
        Remedy.GIVE_UP,
    ]
    assert (watch.counts.found, watch.counts.given_up, watch.counts.resolved) == (2, 2, 0)


def test_nothing_is_tried_before_its_time() -> None:
    watch = StallWatch(LIMITS)
    assert watch.step(at(0.0)) is None
    assert watch.step(at(0.99)) is None
    assert watch.step(at(1.0)) is Remedy.LIFT_LIMIT
    assert watch.step(at(1.24)) is None
    assert watch.step(at(1.25)) is Remedy.NEXT_IN_LINE


def test_progress_after_a_remedy_counts_as_resolved_and_starts_over() -> None:
    watch = StallWatch(LIMITS)
    play(watch, 1.1)
    assert watch.stalled
    watch.step(at(1.2, replace(IDLE, running=1)))
    assert not watch.stalled
    assert watch.counts.resolved == 1
    assert watch.step(at(2.0)) is None, "the wait begins again"


def test_callers_that_hang_up_are_no_resolution() -> None:
    watch = StallWatch(LIMITS)
    play(watch, 1.1)
    watch.step(at(1.2, replace(IDLE, waiting=0)))
    assert watch.counts.resolved == 0


@given(
    st.lists(
        st.builds(
            StepFacts,
            now_s=st.just(0.0),
            running=st.integers(0, 3),
            waiting=st.integers(0, 3),
            scheduled_tokens=st.integers(0, 3),
            transfers=st.booleans(),
            paused=st.booleans(),
        ),
        max_size=40,
    )
)
def test_a_node_that_does_something_or_was_told_to_pause_is_left_alone(
    steps: list[StepFacts],
) -> None:
    watch = StallWatch(LIMITS)
    for second, facts in enumerate(steps):
        remedy = watch.step(at(float(second), facts))
        if facts.running or facts.scheduled_tokens or facts.transfers or facts.paused:
            assert remedy is None
        if not facts.waiting:
            assert remedy is None
    assert watch.counts.resolved + watch.counts.given_up <= watch.counts.found
