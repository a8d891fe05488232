"""Whether other hot buffers pay: shared step time against waits for rows, over one window."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import MissPoint, Progress
from hisparsed.policy.worth import growing, shrinking

CURVE = tuple(MissPoint(at, share) for at, share in ((1.0, 0.3), (2.0, 0.15), (4.0, 0.075)))


def policy(**hot: Any) -> Policy:
    return Policy.model_validate({"version": 1, "hot": hot})


def busy(kit, *, decode_share: float, rows_share: float, seconds: int = 70, **changes: Any):
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


def seen(kit, made: Policy, **shares: Any):
    """The last snapshot and a memory that no move has changed."""
    memory = Memory()
    for snapshot in busy(kit, **shares):
        _, memory = decide(made, snapshot, memory)
    return snapshot, memory


def decision(kit, made: Policy | None = None, **shares: Any):
    memory = Memory()
    for snapshot in busy(kit, **shares):
        found, following = decide(made or policy(pcie_budget="1TB"), snapshot, memory)
        lever = found.of(Lever.MULTIPLIER)
        if lever.acts:
            return lever
        memory = following
    return lever


def test_both_sides_are_seconds_of_the_same_window(kit) -> None:
    snapshot, memory = seen(kit, policy(), decode_share=0.6, rows_share=0.1)
    observed_s = memory.signals.grow_decode_seconds.observed_s
    less = shrinking(policy(), snapshot, memory, 32)
    # A top-k less frees 32 blocks in 8 groups: 256 of the 1,200 that a request holds.
    assert less.saved_s == pytest.approx(0.5 * observed_s * 256 / 1200)
    assert less.cost_s == pytest.approx(0.1 * observed_s * (0.3 / 0.15 - 1))
    more = growing(policy(), snapshot, memory, 128)
    assert more.saved_s == pytest.approx(0.1 * observed_s * (1 - 0.075 / 0.15))
    assert more.cost_s == pytest.approx(0.5 * observed_s * 512 / 1200)


def test_freed_blocks_let_no_more_requests_run_than_wait(kit) -> None:
    snapshot, memory = seen(kit, policy(), decode_share=0.6, rows_share=0.1, requests__waiting=1)
    observed_s = memory.signals.grow_decode_seconds.observed_s
    assert shrinking(policy(), snapshot, memory, 32).saved_s == pytest.approx(0.5 * observed_s / 17)


def test_buffers_shrink_where_steps_only_decode(kit) -> None:
    assert decision(kit, decode_share=0.9, rows_share=0.05).reason is Reason.GPU_POOL_PRESSURE


def test_buffers_are_kept_where_prefill_is_what_steps_are_made_of(kit) -> None:
    """The same misses: but nothing is shared by more requests, and each would wait longer."""
    held = decision(kit, decode_share=0.1, rows_share=0.05, hot__predicted=CURVE[:2])
    assert held.reason is Reason.MISSES_OUTWEIGH
    assert held.figures["shrinking_costs_s"] > held.figures["shrinking_saves_s"]


def test_buffers_grow_though_requests_wait_where_fewer_misses_are_worth_more(kit) -> None:
    grown = decision(kit, decode_share=0.2, rows_share=0.18)
    assert (grown.reason, grown.wanted) == (Reason.FEWER_MISSES_PAY, 2.5)


def test_what_outweighs_little_changes_nothing(kit) -> None:
    """Neither direction pays by a quarter, so the buffers do not go back and forth."""
    held = decision(kit, decode_share=0.48, rows_share=0.08)
    assert held.reason is Reason.MISSES_OUTWEIGH


def test_growing_that_pays_waits_for_its_window(kit) -> None:
    held = decision(kit, decode_share=0.2, rows_share=0.18, seconds=59)
    assert held.reason is Reason.WINDOW_NOT_FULL


def test_a_node_that_does_not_tell_its_times_goes_by_the_budget_alone(kit) -> None:
    memory = Memory()
    snapshots = [
        kit.change(one, progress=None) for one in busy(kit, decode_share=0, rows_share=0.1)
    ]
    assert shrinking(policy(), snapshots[-1], memory, 32) is None
    reasons = set()
    for snapshot in snapshots:
        found, memory = decide(policy(pcie_budget="1TB"), snapshot, memory)
        reasons.add(found.of(Lever.MULTIPLIER).reason)
    assert Reason.GPU_POOL_PRESSURE in reasons


def test_misses_without_a_curve_are_expected_to_rise_more_than_in_proportion(kit) -> None:
    snapshot, memory = seen(kit, policy(), decode_share=0.6, rows_share=0.1, hot__predicted=())
    observed_s = memory.signals.grow_decode_seconds.observed_s
    less = shrinking(policy(), snapshot, memory, 32)
    assert less.cost_s == pytest.approx(0.1 * observed_s * (2**1.5 - 1))
    assert growing(policy(), snapshot, memory, 128) is None
