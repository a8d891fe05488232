"""The admission lever: hysteresis at its edges, limits, a fixed order, and the ageing bound.

Ageing follows the queue, on a coarse scale and never above the longest wait.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.admission import ageing_s, natural_wait_s
from hisparsed.policy.bounds import start_command
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory, remember
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, Lever

ARRIVAL, HELD_FIRST = AdmissionOrder.ARRIVAL, AdmissionOrder.HELD_PREFIX_FIRST


def policy(**admission: Any) -> Policy:
    made = {"engage_at": "70%", "release_at": "55%", **admission}
    return Policy.model_validate({"version": 1, "admission": made})


def loaded(kit, load: float, order: AdmissionOrder = ARRIVAL, **changes: Any):
    """An otherwise idle node whose live set is ``load`` times the smaller reach."""
    snapshot = kit.idle_snapshot(lent=650)
    reach = (10_000 - 650) * 64
    return kit.change(
        snapshot,
        sessions__live_set_tokens=round(load * reach),
        sessions__live_sessions=5,
        admission__order=order,
        **changes,
    )


def last(kit, made: Policy, snapshot, seconds: int):
    return kit.reasons_over(made, kit.held_for(snapshot, seconds), Lever.ADMISSION)[-1]


@pytest.mark.parametrize(
    ("load", "order", "seconds", "reason", "wanted"),
    [
        (0.70, ARRIVAL, 0, Reason.IN_DEAD_BAND, ARRIVAL),
        (0.71, ARRIVAL, 0, Reason.COVERAGE_LOW, HELD_FIRST),
        (0.71, HELD_FIRST, 60, Reason.AT_TARGET, HELD_FIRST),
        (0.55, HELD_FIRST, 60, Reason.IN_DEAD_BAND, HELD_FIRST),
        (0.54, HELD_FIRST, 29, Reason.WINDOW_NOT_FULL, HELD_FIRST),
        (0.54, HELD_FIRST, 30, Reason.COVERAGE_RECOVERED, ARRIVAL),
        (0.54, ARRIVAL, 60, Reason.NO_BENEFIT, ARRIVAL),
        (9.00, ARRIVAL, 0, Reason.COVERAGE_LOW, HELD_FIRST),
    ],
)
def test_hysteresis_edges(
    kit,
    load: float,
    order: AdmissionOrder,
    seconds: int,
    reason: Reason,
    wanted: AdmissionOrder,
) -> None:
    decision = last(kit, policy(), loaded(kit, load, order), seconds)
    assert (decision.reason, decision.wanted) == (reason, wanted)


def test_a_peak_in_the_window_keeps_the_order(kit) -> None:
    snapshots = kit.held_for(loaded(kit, 0.3, HELD_FIRST), 40)
    snapshots[25] = kit.change(loaded(kit, 0.6, HELD_FIRST), at_s=snapshots[25].at_s)
    decisions = kit.reasons_over(policy(), snapshots, Lever.ADMISSION)
    assert decisions[-1].reason is Reason.WINDOW_NOT_FULL


def test_no_session_no_pressure(kit) -> None:
    assert last(kit, policy(), kit.idle_snapshot(), 0).reason is Reason.NO_TRAFFIC


def test_no_reach_at_all_engages(kit) -> None:
    empty = kit.change(loaded(kit, 0.1), offload__capacity_chunks=0)
    assert last(kit, policy(), empty, 0).reason is Reason.COVERAGE_LOW


def test_limits_come_and_go_with_the_order(kit) -> None:
    made = policy(max_waiting_sessions=3, retry_after="7s", ageing="12s", max_running=20)
    decision, _ = decide(made, loaded(kit, 0.9), Memory())
    assert decision.commands.admission == AdmissionRules(HELD_FIRST, 12.0, 20, 3, 7.0)
    assert decision.of(Lever.ADMISSION).figures["max_waiting_sessions"] == 3
    engaged = kit.change(loaded(kit, 0.1), admission=AdmissionRules(HELD_FIRST, 12.0, 20, 3, 7.0))
    memory = Memory()
    for snapshot in kit.held_for(engaged, 30):
        decision, memory = decide(made, snapshot, memory)
    assert decision.commands.admission == AdmissionRules(ARRIVAL, 12.0, 20, None, 7.0)


def test_new_limits_in_the_policy_are_put_in_force(kit) -> None:
    decision, _ = decide(policy(ageing="5s"), loaded(kit, 0.2), Memory())
    admission = decision.of(Lever.ADMISSION)
    assert admission.reason is Reason.POLICY_VALUE
    assert decision.commands.admission == AdmissionRules(ARRIVAL, 5.0, 64, None, 10.0)


def test_release_follows_engage_where_it_is_not_set() -> None:
    shares = [
        policy(engage_at=at, release_at="auto").admission.release_share for at in ("100%", "40%")
    ]
    assert shares == pytest.approx([0.85, 0.34])
    assert policy(engage_at="60%", release_at="30%").admission.release_share == 0.3


def test_max_running_never_exceeds_the_node(kit) -> None:
    decision, _ = decide(policy(max_running=500), loaded(kit, 0.9), Memory())
    assert decision.commands.admission is not None
    assert decision.commands.admission.max_running == 64


@pytest.mark.parametrize("order", ["arrival", "held-prefix-first"])
def test_a_fixed_order_ignores_coverage(kit, order: str) -> None:
    for load in (0.1, 0.9):
        at_target = loaded(kit, load, AdmissionOrder(order))
        assert last(kit, policy(order=order), at_target, 60).reason is Reason.AT_TARGET
        other = HELD_FIRST if order == "arrival" else ARRIVAL
        moved = last(kit, policy(order=order), loaded(kit, load, other), 0)
        assert (moved.reason, moved.wanted) == (Reason.POLICY_VALUE, order)


def test_running_sessions_are_not_counted_against_idle_reach(kit) -> None:
    """Half the node in use by live sessions is not twice the load."""
    busy = loaded(kit, 0.5, hisparse__in_use_blocks=4_000)
    decision = last(kit, policy(), busy, 0)
    assert decision.reason is Reason.NO_BENEFIT
    assert decision.figures["load_ratio"] < 0.5


HELD_PREFIX_FIRST = AdmissionOrder.HELD_PREFIX_FIRST


def ageing_policy(**admission: Any) -> Policy:
    return Policy.model_validate({"version": 1, "admission": admission})


def queued(kit, waiting: int, ended_a_minute: int, seconds: int = 120):
    """Memory after ``seconds`` of a queue of this length and pace."""
    memory, snapshot = Memory(), kit.change(kit.idle_snapshot(), requests__waiting=waiting)
    for second in range(seconds + 1):
        ended = second * ended_a_minute // 60
        one = kit.change(snapshot, at_s=1_000.0 + second, requests__finished_total=ended)
        memory = remember(ageing_policy(), one, memory)
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
    assert ageing_s(ageing_policy(), memory, 77.0) == 77.0


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
    assert ageing_s(ageing_policy(), memory, in_force_s) == bound_s


def test_a_duration_is_taken_as_it_is(kit) -> None:
    assert ageing_s(ageing_policy(ageing="12s"), queued(kit, 200, 60), 30.0) == 12.0


def test_a_short_max_wait_caps_the_start_too(kit) -> None:
    commands = start_command(ageing_policy(max_wait="10s"), kit.geometry)
    assert commands.admission is not None
    assert (commands.admission.ageing_s, commands.admission.max_wait_s) == (10.0, 10.0)


def over_subscribed(kit, order: AdmissionOrder, **changes: Any):
    in_force = AdmissionRules(order, 30.0, kit.geometry.max_num_seqs, None, 10.0)
    return kit.change(
        kit.idle_snapshot(),
        sessions__live_set_tokens=10**9,
        sessions__live_sessions=9,
        requests__running=4,
        admission=in_force,
        **changes,
    )


def test_a_longer_queue_is_answered_once_and_explained(kit) -> None:
    snapshot, memory, acted = (
        over_subscribed(kit, HELD_PREFIX_FIRST, requests__waiting=20),
        Memory(),
        [],
    )
    for second in range(400):
        snapshot = kit.change(
            snapshot, at_s=1_000.0 + second, requests__finished_total=second, tick=second
        )
        decision, memory = decide(ageing_policy(), snapshot, memory)
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
    decision, _ = decide(ageing_policy(), snapshot, memory)
    assert not decision.commands.admission


def test_what_is_held_back_is_said_and_counted(kit) -> None:
    snapshot = over_subscribed(
        kit,
        HELD_PREFIX_FIRST,
        requests__waiting=5,
        requests__held_back=3,
        requests__refused_total=11,
        requests__oldest_wait_s=42.0,
    )
    lever = decide(ageing_policy(), snapshot, Memory())[0].of(Lever.ADMISSION)
    assert lever.reason is Reason.AT_TARGET
    assert "3 waiting requests are held by the limit of 64" in lever.sentence
    assert lever.figures["held_back_requests"] == 3
    assert lever.figures["refused_total_requests"] == 11
    assert lever.figures["oldest_wait_seconds"] == 42


def test_unknown_counts_are_left_out_rather_than_zero(kit) -> None:
    lever = decide(ageing_policy(), over_subscribed(kit, HELD_PREFIX_FIRST), Memory())[0].of(
        Lever.ADMISSION
    )
    assert not {"held_back_requests", "refused_total_requests"} & set(lever.figures)


def test_max_running_above_the_node_is_said(kit) -> None:
    lever = decide(ageing_policy(max_running=500), kit.idle_snapshot(), Memory())[0].of(
        Lever.ADMISSION
    )
    assert lever.limited_by is Reason.LIMITED_BY_CEILING
    assert "max_running 500 is more than the 64 this node was started with" in lever.sentence


def test_switched_off_it_says_what_stays_in_force(kit) -> None:
    limits = AdmissionRules(HELD_PREFIX_FIRST, 30.0, 20, 3, 10.0, max_context_tokens=8_000)
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
    made = ageing_policy(
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
    assert decision.commands.admission == AdmissionRules(
        HELD_PREFIX_FIRST, 60.0, 9, 2, 7.0, 120.0, "wait", 8_000, "wait"
    )
