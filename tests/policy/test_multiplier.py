"""The multiplier lever: every reason at its edge, its prediction, what another size is worth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Direction, Memory, MoveHistory
from hisparsed.policy.multiplier import growing, predicted_bytes_per_s, shrinking
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, MissPoint, Progress

SHRINK, GROW = Reason.GPU_POOL_PRESSURE, Reason.ROOM_TO_GROW
TRAFFIC = {
    "hot__references_total": 10_000,
    "hot__resident_total": 2_000,
    "hot__hits_total": 7_000,
    "hot__loads_total": 1_000,
    "hot__h2d_bytes_total": 6_400_000,
}


def policy(**hot: Any) -> Policy:
    return Policy.model_validate({"version": 1, "hot": hot})


def snapshot_with(kit, free_share: float, **changes: Any):
    """Somebody waits where there is no room to grow."""
    free = round(free_share * kit.geometry.gpu_blocks_total)
    waiting = int(free_share < 0.25)
    defaults = {
        "gpu__free_blocks": free,
        "requests__running": 4,
        "requests__none": 4,
        "requests__waiting": waiting,
    }
    return kit.change(kit.idle_snapshot(), **{**defaults, **changes})


def last(kit, made: Policy, snapshot, seconds: int, history: MoveHistory | None = None):
    memory = Memory(multiplier=history or MoveHistory())
    for one in kit.held_for(snapshot, seconds, **TRAFFIC):
        decision, following = decide(made, one, memory)
        if decision.of(Lever.MULTIPLIER).acts:
            following = dataclasses.replace(following, multiplier=memory.multiplier)
        memory = following
    return decision.of(Lever.MULTIPLIER)


@pytest.mark.parametrize(
    ("free_share", "waiting_for_blocks", "seconds", "reason"),
    [
        (0.0499, False, 10, SHRINK),
        (0.05, False, 10, Reason.IN_DEAD_BAND),
        (0.15, True, 10, SHRINK),
        (0.0499, False, 9, Reason.WINDOW_NOT_FULL),
        (0.2499, False, 60, Reason.IN_DEAD_BAND),
        (0.25, False, 60, GROW),
        (0.25, False, 59, Reason.WINDOW_NOT_FULL),
    ],
)
def test_thresholds_and_windows(
    kit, free_share: float, waiting_for_blocks: bool, seconds: int, reason: Reason
) -> None:
    snapshot = snapshot_with(kit, free_share, gpu__waiting_for_blocks=waiting_for_blocks)
    decision = last(kit, policy(), snapshot, seconds)
    wanted = {SHRINK: 1.5, GROW: 2.5}.get(reason, 2.0)
    assert (decision.reason, decision.wanted) == (reason, wanted)


def test_one_moment_without_pressure_keeps_the_lease(kit) -> None:
    short = kit.held_for(snapshot_with(kit, 0.01), 12, **TRAFFIC)
    short[8] = kit.change(short[8], gpu__free_blocks=10_000)
    decisions = kit.reasons_over(policy(), short, Lever.MULTIPLIER)
    assert [one.reason for one in decisions].count(Reason.NOT_KV_PRESSURE) == 1
    assert {one.reason for one in decisions} == {Reason.WINDOW_NOT_FULL, Reason.NOT_KV_PRESSURE}


@pytest.mark.parametrize(
    ("multiplier", "free_share", "reason"),
    [
        (1.0, 0.01, Reason.LIMITED_BY_FLOOR),
        (1.0 + 1 / 32, 0.01, SHRINK),
        (4.0, 0.5, Reason.LIMITED_BY_CEILING),
        (4.0 - 1 / 32, 0.5, GROW),
    ],
)
def test_range_edges(kit, multiplier: float, free_share: float, reason: Reason) -> None:
    decision = last(
        kit, policy(), snapshot_with(kit, free_share, hot__multiplier=multiplier), seconds=60
    )
    assert decision.reason is reason
    assert 1.0 <= decision.wanted <= 4.0
    assert decision.wanted * 32 == int(decision.wanted * 32), "whole hot blocks"


@pytest.mark.parametrize(("multiplier", "wanted"), [(5.0, 4.0), (0.5, 1.0)])
def test_outside_the_range_goes_back_at_once(kit, multiplier: float, wanted: float) -> None:
    decision = last(kit, policy(), snapshot_with(kit, 0.15, hot__multiplier=multiplier), 0)
    assert (decision.reason, decision.wanted) == (Reason.OUTSIDE_BOUNDS, wanted)


def test_no_lease_no_benefit(kit) -> None:
    resident = {"requests__none": 0, "requests__full": 4}
    for free_share in (0.01, 0.5):
        decision = last(kit, policy(), snapshot_with(kit, free_share, **resident), 60)
        assert decision.reason is Reason.NO_BENEFIT


def test_idle_node_does_not_grow(kit) -> None:
    idle = snapshot_with(kit, 0.9, requests__running=0, requests__none=0)
    assert last(kit, policy(), idle, 60).reason is Reason.NO_TRAFFIC


def test_waiting_requests_stop_growth(kit) -> None:
    held = last(kit, policy(), snapshot_with(kit, 0.5, requests__waiting=1), 60)
    assert held.reason is Reason.NOT_KV_PRESSURE


def test_nothing_missed_nothing_to_gain(kit) -> None:
    still = kit.held_for(snapshot_with(kit, 0.5), 60, tokens__prompt_total=10)
    decisions = kit.reasons_over(policy(), still, Lever.MULTIPLIER)
    assert decisions[-1].reason is Reason.NO_BENEFIT


@pytest.mark.parametrize(("running", "reason"), [(19, GROW), (20, Reason.LIMITED_BY_IN_USE)])
def test_growth_leaves_the_middle_of_the_band_free(kit, running: int, reason: Reason) -> None:
    # 16 blocks x 8 groups per request; 27.75 % free of 20,000 less 15 % leaves 2,550 to take.
    snapshot = snapshot_with(kit, 0.2775, requests__running=running, requests__none=running)
    assert last(kit, policy(), snapshot, 60).reason is reason


# 1,000 loads a second at 2x become 1,000 x (2 / 1.5) ** 1.5 at 1.5x, of 6,400 B each.
PREDICTED = 1_000 * (2 / 1.5) ** 1.5 * 6_400


@pytest.mark.parametrize(
    ("budget", "reason"),
    [(int(PREDICTED) + 1, SHRINK), (int(PREDICTED), Reason.LIMITED_BY_PCIE)],
)
def test_misses_must_fit_the_pcie_budget(kit, budget: int, reason: Reason) -> None:
    made = policy(pcie_budget=budget)
    decision = last(kit, made, snapshot_with(kit, 0.01), 10)
    assert decision.reason is reason
    assert decision.figures["predicted_bytes_per_s"] == pytest.approx(PREDICTED)
    assert "9.4MiB/s" in decision.sentence
    assert decision.limited_by is (None if reason is SHRINK else reason)


def observed(kit, **changes: Any):
    memory = Memory()
    for one in kit.held_for(snapshot_with(kit, 0.15, **changes), 10, **TRAFFIC):
        _, memory = decide(policy(), one, memory)
    return one, memory


def test_prediction_never_exceeds_missing_every_host_row(kit) -> None:
    snapshot, memory = observed(kit, hot__multiplier=4.0)
    worst = predicted_bytes_per_s(snapshot, memory, lease=1)
    assert worst == pytest.approx(8_000 * 6_400)


def test_a_larger_lease_is_not_credited_with_fewer_misses(kit) -> None:
    snapshot, memory = observed(kit)
    assert predicted_bytes_per_s(snapshot, memory, lease=128) == pytest.approx(1_000 * 6_400)


def test_the_nodes_own_curve_is_preferred_and_rounded_down(kit) -> None:
    curve = (MissPoint(1.0, 0.5), MissPoint(1.5, 0.3), MissPoint(2.0, 0.125))
    snapshot, memory = observed(kit, hot__predicted=curve)
    assert predicted_bytes_per_s(snapshot, memory, lease=48) == pytest.approx(0.3 * 8_000 * 6_400)
    assert predicted_bytes_per_s(snapshot, memory, lease=47) == pytest.approx(0.5 * 8_000 * 6_400)


def test_nothing_observed_predicts_nothing(kit) -> None:
    assert predicted_bytes_per_s(kit.idle_snapshot(), Memory(), lease=32) is None


@pytest.mark.parametrize(
    ("free_share", "direction", "undone", "ago_s", "reason"),
    [
        (0.01, Direction.SAFETY, 0, 9.9, Reason.COOLING_DOWN),
        (0.01, Direction.SAFETY, 0, 10.0, SHRINK),
        (0.01, Direction.THRIFT, 3, 10.0, SHRINK),
        (0.5, Direction.SAFETY, 0, 59.9, Reason.COOLING_DOWN),
        (0.5, Direction.SAFETY, 0, 60.0, GROW),
        (0.5, Direction.SAFETY, 1, 119.9, Reason.BACKED_OFF),
        (0.5, Direction.SAFETY, 1, 120.0, GROW),
    ],
)
def test_cool_down_and_back_off(
    kit, free_share: float, direction: Direction, undone: int, ago_s: float, reason: Reason
) -> None:
    snapshot = snapshot_with(kit, free_share)
    end_s = snapshot.at_s + 60
    history = MoveHistory(end_s - ago_s, direction, None, undone, end_s)
    assert last(kit, policy(), snapshot, 60, history).reason is reason


@pytest.mark.parametrize("dip", [{"gpu__free_blocks": 4_000}, {"requests__waiting": 1}])
def test_one_moment_without_room_keeps_the_lease(kit, dip: dict[str, int]) -> None:
    roomy = kit.held_for(snapshot_with(kit, 0.5), 65, **TRAFFIC)
    roomy[30] = kit.change(roomy[30], **dip)
    decisions = kit.reasons_over(policy(), roomy, Lever.MULTIPLIER)
    assert not any(one.acts for one in decisions)
    assert decisions[-1].reason is Reason.WINDOW_NOT_FULL


@pytest.mark.parametrize(
    ("free_share", "direction"), [(0.01, Direction.SAFETY), (0.5, Direction.THRIFT)]
)
def test_shrinking_is_remembered_as_the_safe_direction(
    kit, free_share: float, direction: Direction
) -> None:
    memory = Memory()
    for one in kit.held_for(snapshot_with(kit, free_share), 60, **TRAFFIC):
        _, memory = decide(policy(), one, memory)
    assert memory.multiplier.last_direction is direction


def test_few_free_blocks_without_anybody_waiting_keep_the_lease(kit) -> None:
    held = last(kit, policy(), snapshot_with(kit, 0.01, requests__waiting=0), 60)
    assert held.reason is Reason.IN_DEAD_BAND
    assert "no request waits for them" in held.sentence


CURVE = tuple(MissPoint(at, share) for at, share in ((1.0, 0.3), (2.0, 0.15), (4.0, 0.075)))


def busy_with(kit, *, decode_share: float, rows_share: float, seconds: int = 70, **changes: Any):
    """Ticks of a node at 2x that is short of GPU blocks: shares of its time, second by second.

    16 requests hold 19,200 of 20,000 blocks, 1,200 each, 512 of them hot.
    """
    values: dict[str, Any] = {
        "gpu__free_blocks": 800,
        "gpu__waiting_for_blocks": True,
        "gpu__head_need_blocks": 900,
        "requests__running": 16,
        "requests__none": 16,
        "requests__waiting": 16,
        "hot__predicted": CURVE,
        **changes,
    }
    for second in range(seconds):
        yield kit.change(
            kit.idle_snapshot(),
            at_s=1000.0 + second,
            tick=second,
            progress=Progress(second * 30, second * 2_000, second * decode_share),
            hot__loads_total=second * 1_000,
            hot__references_total=second * 9_000,
            hot__h2d_bytes_total=int(second * rows_share * 37e9),
            **values,
        )


def memory_after(kit, made: Policy, **shares: Any):
    """The last snapshot and a memory that no move has changed."""
    memory = Memory()
    for snapshot in busy_with(kit, **shares):
        _, memory = decide(made, snapshot, memory)
    return snapshot, memory


def last_decision(kit, made: Policy | None = None, **shares: Any):
    memory = Memory()
    for snapshot in busy_with(kit, **shares):
        found, following = decide(made or policy(pcie_budget="1TB"), snapshot, memory)
        lever = found.of(Lever.MULTIPLIER)
        if lever.acts:
            return lever
        memory = following
    return lever


def test_both_sides_are_seconds_of_the_same_window(kit) -> None:
    snapshot, memory = memory_after(kit, policy(), decode_share=0.6, rows_share=0.1)
    observed_s = memory.signals.grow_decode_seconds.observed_s
    less = shrinking(policy(), snapshot, memory, 32)
    # A top-k less frees 32 blocks in 8 groups: 256 of the 1,200 that a request holds.
    assert less.saved_s == pytest.approx(0.5 * observed_s * 256 / 1200)
    assert less.cost_s == pytest.approx(0.1 * observed_s * (0.3 / 0.15 - 1))
    more = growing(policy(), snapshot, memory, 128)
    assert more.saved_s == pytest.approx(0.1 * observed_s * (1 - 0.075 / 0.15))
    assert more.cost_s == pytest.approx(0.5 * observed_s * 512 / 1200)


def test_freed_blocks_let_no_more_requests_run_than_wait(kit) -> None:
    snapshot, memory = memory_after(
        kit, policy(), decode_share=0.6, rows_share=0.1, requests__waiting=1
    )
    observed_s = memory.signals.grow_decode_seconds.observed_s
    assert shrinking(policy(), snapshot, memory, 32).saved_s == pytest.approx(0.5 * observed_s / 17)


def test_buffers_shrink_where_steps_only_decode(kit) -> None:
    assert last_decision(kit, decode_share=0.9, rows_share=0.05).reason is Reason.GPU_POOL_PRESSURE


def test_buffers_are_kept_where_prefill_is_what_steps_are_made_of(kit) -> None:
    """The same misses: but nothing is shared by more requests, and each would wait longer."""
    held = last_decision(kit, decode_share=0.1, rows_share=0.05, hot__predicted=CURVE[:2])
    assert held.reason is Reason.MISSES_OUTWEIGH
    assert held.figures["shrinking_costs_s"] > held.figures["shrinking_saves_s"]


def test_buffers_grow_though_requests_wait_where_fewer_misses_are_worth_more(kit) -> None:
    grown = last_decision(kit, decode_share=0.2, rows_share=0.18)
    assert (grown.reason, grown.wanted) == (Reason.FEWER_MISSES_PAY, 2.5)


def test_what_outweighs_little_changes_nothing(kit) -> None:
    """Neither direction pays by a quarter, so the buffers do not go back and forth."""
    held = last_decision(kit, decode_share=0.48, rows_share=0.08)
    assert held.reason is Reason.MISSES_OUTWEIGH


def test_growing_that_pays_waits_for_its_window(kit) -> None:
    held = last_decision(kit, decode_share=0.2, rows_share=0.18, seconds=59)
    assert held.reason is Reason.WINDOW_NOT_FULL


def test_a_node_that_does_not_tell_its_times_goes_by_the_budget_alone(kit) -> None:
    memory = Memory()
    snapshots = [
        kit.change(one, progress=None) for one in busy_with(kit, decode_share=0, rows_share=0.1)
    ]
    assert shrinking(policy(), snapshots[-1], memory, 32) is None
    reasons = set()
    for snapshot in snapshots:
        found, memory = decide(policy(pcie_budget="1TB"), snapshot, memory)
        reasons.add(found.of(Lever.MULTIPLIER).reason)
    assert Reason.GPU_POOL_PRESSURE in reasons


def test_misses_without_a_curve_are_expected_to_rise_more_than_in_proportion(kit) -> None:
    snapshot, memory = memory_after(
        kit, policy(), decode_share=0.6, rows_share=0.1, hot__predicted=()
    )
    observed_s = memory.signals.grow_decode_seconds.observed_s
    less = shrinking(policy(), snapshot, memory, 32)
    assert less.cost_s == pytest.approx(0.1 * observed_s * (2**1.5 - 1))
    assert growing(policy(), snapshot, memory, 128) is None
