"""The admission lever: hysteresis at its edges, limits, and a fixed order."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, AdmissionOrder

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
    assert decision.commands.admission == Admission(HELD_FIRST, 12.0, 20, 3, 7.0)
    assert decision.of(Lever.ADMISSION).figures["max_waiting_sessions"] == 3
    engaged = kit.change(loaded(kit, 0.1), admission=Admission(HELD_FIRST, 12.0, 20, 3, 7.0))
    memory = Memory()
    for snapshot in kit.held_for(engaged, 30):
        decision, memory = decide(made, snapshot, memory)
    assert decision.commands.admission == Admission(ARRIVAL, 12.0, 20, None, 7.0)


def test_new_limits_in_the_policy_are_put_in_force(kit) -> None:
    decision, _ = decide(policy(ageing="5s"), loaded(kit, 0.2), Memory())
    admission = decision.of(Lever.ADMISSION)
    assert admission.reason is Reason.POLICY_VALUE
    assert decision.commands.admission == Admission(ARRIVAL, 5.0, 64, None, 10.0)


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
