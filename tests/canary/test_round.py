"""When a round is due, and when a node is left alone."""

from __future__ import annotations

from dataclasses import replace

from hisparsed.canary.round import CanarySchedule, Conditions, Trigger
from hisparsed.policy.schema import Canary

SETTINGS = Canary(every=600.0, least_gap=60.0, after_move=0.05, most_waiting=2)
IDLE = Conditions(
    now_s=0.0,
    waiting=0,
    coverage_low=False,
    offload_target_blocks=100,
    budget_blocks=1000,
    moving=False,
)


def started() -> CanarySchedule:
    schedule = CanarySchedule()
    assert schedule.look(SETTINGS, IDLE) is Trigger.START
    schedule.ran(0.0)
    return schedule


def test_the_first_round_comes_at_the_start_and_the_next_after_the_period() -> None:
    schedule = started()
    assert schedule.look(SETTINGS, replace(IDLE, now_s=599.9)) is None
    assert schedule.look(SETTINGS, replace(IDLE, now_s=600.0)) is Trigger.PERIOD


def test_a_move_of_five_percent_asks_for_a_round_once_it_has_arrived() -> None:
    schedule = started()
    moved = replace(IDLE, now_s=70.0, offload_target_blocks=150)
    assert schedule.look(SETTINGS, replace(moved, moving=True)) is None
    assert schedule.look(SETTINGS, moved) is Trigger.MOVE
    schedule.ran(70.0)
    assert schedule.look(SETTINGS, replace(moved, now_s=200.0)) is None


def test_small_moves_add_up_in_both_directions() -> None:
    schedule = started()
    targets = [120, 100, 109]
    for at, target in enumerate(targets):
        seen = replace(IDLE, now_s=100.0 + at, offload_target_blocks=target)
        assert schedule.look(SETTINGS, seen) is None
    seen = replace(IDLE, now_s=110.0, offload_target_blocks=110)
    assert schedule.look(SETTINGS, seen) is Trigger.MOVE


def test_two_rounds_are_never_closer_than_the_gap() -> None:
    schedule = started()
    moved = replace(IDLE, offload_target_blocks=500)
    assert schedule.look(SETTINGS, replace(moved, now_s=59.9)) is None
    assert schedule.look(SETTINGS, replace(moved, now_s=60.0)) is Trigger.MOVE


def test_a_policy_that_changes_counts_at_once() -> None:
    schedule = started()
    often = SETTINGS.model_copy(update={"every": 1.0, "least_gap": 1.0})
    assert schedule.look(often, replace(IDLE, now_s=1.0)) is Trigger.PERIOD


def test_a_round_is_left_out_once_and_tried_again_after_the_gap() -> None:
    schedule = started()
    busy = replace(IDLE, now_s=600.0, waiting=3)
    assert schedule.look(SETTINGS, busy) is None
    assert schedule.look(SETTINGS, replace(busy, now_s=601.0)) is None
    assert schedule.left_out == 1
    assert schedule.look(SETTINGS, replace(IDLE, now_s=659.9)) is None
    assert schedule.look(SETTINGS, replace(IDLE, now_s=660.0)) is Trigger.PERIOD


def test_as_many_waiting_calls_as_the_policy_allows_do_not_matter() -> None:
    assert CanarySchedule().look(SETTINGS, replace(IDLE, waiting=2)) is Trigger.START


def test_an_over_subscribed_node_is_left_alone() -> None:
    schedule = CanarySchedule()
    assert schedule.look(SETTINGS, replace(IDLE, coverage_low=True)) is None
    assert schedule.left_out == 1
