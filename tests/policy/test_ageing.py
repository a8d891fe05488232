"""The ageing bound follows the queue, on a coarse scale and never above the longest wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.ageing import ageing_s, natural_wait_s
from hisparsed.policy.decide import decide, start_commands
from hisparsed.policy.memory import Memory, observe
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, AdmissionOrder

HELD_FIRST = AdmissionOrder.HELD_PREFIX_FIRST


def policy(**admission: Any) -> Policy:
    return Policy.model_validate({"version": 1, "admission": admission})


def queued(kit, waiting: int, ended_a_minute: int, seconds: int = 120):
    """Memory after ``seconds`` of a queue of this length and pace."""
    memory, snapshot = Memory(), kit.change(kit.idle_snapshot(), requests__waiting=waiting)
    for second in range(seconds + 1):
        ended = second * ended_a_minute // 60
        one = kit.change(snapshot, at_s=1_000.0 + second, requests__finished_total=ended)
        memory = observe(policy(), one, memory)
    return memory


def test_the_natural_wait_is_the_queue_over_its_pace(kit) -> None:
    assert natural_wait_s(queued(kit, waiting=20, ended_a_minute=60)) == pytest.approx(20.0)


def test_an_empty_queue_does_not_wait(kit) -> None:
    assert natural_wait_s(queued(kit, waiting=0, ended_a_minute=0)) == 0.0


@pytest.mark.parametrize(
    ("waiting", "pace", "seconds"), [(20, 0, 120), (20, 60, 59)], ids=["none ended", "too short"]
)
def test_an_unknown_pace_is_unknown_and_keeps_the_bound(
    kit, waiting: int, pace: int, seconds: int
) -> None:
    memory = queued(kit, waiting, pace, seconds)
    assert natural_wait_s(memory) is None
    assert ageing_s(policy(), memory, 77.0) == 77.0


@pytest.mark.parametrize(
    ("waiting", "in_force_s", "bound_s"),
    [
        (1, 30.0, 30.0),
        (20, 30.0, 120.0),
        (20, 120.0, 120.0),
        (20, 240.0, 240.0),
        (20, 480.0, 120.0),
        (200, 30.0, 600.0),
        (200, 900.0, 600.0),
    ],
)
def test_four_queueing_times_on_a_coarse_scale(
    kit, waiting: int, in_force_s: float, bound_s: float
) -> None:
    """Up at once; down only when over twice too long; never above max_wait."""
    memory = queued(kit, waiting, ended_a_minute=60)
    assert ageing_s(policy(), memory, in_force_s) == bound_s


def test_a_duration_is_taken_as_it_is(kit) -> None:
    assert ageing_s(policy(ageing="12s"), queued(kit, 200, 60), 30.0) == 12.0


def test_a_short_max_wait_caps_the_start_too(kit) -> None:
    commands = start_commands(policy(max_wait="10s"), kit.geometry)
    assert commands.admission is not None
    assert (commands.admission.ageing_s, commands.admission.max_wait_s) == (10.0, 10.0)


def over_subscribed(kit, order: AdmissionOrder, **changes: Any):
    in_force = Admission(order, 30.0, kit.geometry.max_num_seqs, None, 10.0)
    return kit.change(
        kit.idle_snapshot(),
        sessions__live_set_tokens=10**9,
        sessions__live_sessions=9,
        requests__running=4,
        admission=in_force,
        **changes,
    )


def test_a_longer_queue_is_answered_once_and_explained(kit) -> None:
    snapshot, memory, acted = over_subscribed(kit, HELD_FIRST, requests__waiting=20), Memory(), []
    for second in range(400):
        snapshot = kit.change(
            snapshot, at_s=1_000.0 + second, requests__finished_total=second, tick=second
        )
        decision, memory = decide(policy(), snapshot, memory)
        lever = decision.of(Lever.ADMISSION)
        if decision.commands.admission is not None:
            acted.append(lever)
            snapshot = dataclasses.replace(snapshot, admission=decision.commands.admission)
    assert [one.reason for one in acted] == [Reason.QUEUE_CHANGED]
    assert snapshot.admission.ageing_s == 120.0
    assert "calls wait about 20s in order of arrival" in acted[0].sentence


def test_in_order_of_arrival_the_bound_is_left_alone(kit) -> None:
    memory = queued(kit, 20, 60)
    snapshot = kit.change(
        kit.idle_snapshot(), at_s=1_121.0, requests__waiting=20, requests__finished_total=121
    )
    decision, _ = decide(policy(), snapshot, memory)
    assert not decision.commands.admission


def test_what_is_held_back_is_said_and_counted(kit) -> None:
    snapshot = over_subscribed(
        kit,
        HELD_FIRST,
        requests__waiting=5,
        requests__held_back=3,
        requests__refused_total=11,
        requests__oldest_wait_s=42.0,
    )
    lever = decide(policy(), snapshot, Memory())[0].of(Lever.ADMISSION)
    assert lever.reason is Reason.AT_TARGET
    assert "3 waiting requests are held by the limit of 64" in lever.sentence
    assert lever.figures["held_back_requests"] == 3
    assert lever.figures["refused_total_requests"] == 11
    assert lever.figures["oldest_wait_seconds"] == 42


def test_unknown_counts_are_left_out_rather_than_zero(kit) -> None:
    lever = decide(policy(), over_subscribed(kit, HELD_FIRST), Memory())[0].of(Lever.ADMISSION)
    assert not {"held_back_requests", "refused_total_requests"} & set(lever.figures)


def test_max_running_above_the_node_is_said(kit) -> None:
    lever = decide(policy(max_running=500), kit.idle_snapshot(), Memory())[0].of(Lever.ADMISSION)
    assert lever.limited_by is Reason.LIMITED_BY_CEILING
    assert "max_running 500 is more than the 64 this node was started with" in lever.sentence


def test_switched_off_it_says_what_stays_in_force(kit) -> None:
    limits = Admission(HELD_FIRST, 30.0, 20, 3, 10.0, max_context_tokens=8_000)
    snapshot = kit.change(kit.idle_snapshot(), admission=limits)
    off = Policy.model_validate({"version": 1, "levers": {"admission": {"mode": "off"}}})
    lever = decide(off, snapshot, Memory())[0].of(Lever.ADMISSION)
    assert lever.reason is Reason.OFF
    assert lever.sentence == (
        "Leave admission alone: its mode is off; still in force: the held-prefix-first order, at "
        "most 20 running requests, new sessions held while 3 calls wait, a longest call of 8000 "
        "tokens."
    )


def test_every_limit_reaches_the_command(kit) -> None:
    made = policy(
        order="held-prefix-first",
        max_waiting_sessions=2,
        when_full="wait",
        max_wait="2m",
        ageing="1m",
        max_context=8_000,
        over_max_context="wait",
        retry_after="7s",
        max_running=9,
    )
    decision, _ = decide(made, kit.idle_snapshot(), Memory())
    assert decision.commands.admission == Admission(
        HELD_FIRST, 60.0, 9, 2, 7.0, 120.0, "wait", 8_000, "wait"
    )
