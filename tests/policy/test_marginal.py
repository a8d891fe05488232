"""Marginal value at its edges, and whether a move is judged by what it brought."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Direction, Memory, MoveHistory, served_with
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint

# A step is 1 % of the budget: 100 blocks; a step takes 18 times that from the offload reach.
STEP, DEEP = 100, 1_900


def policy(**rebalance: Any) -> Policy:
    return Policy.model_validate(
        {"version": 1, "rebalance": {"strategy": "marginal-value", **rebalance}}
    )


def curve(near: int, half: int, deep: int) -> tuple[GhostPoint, ...]:
    return (GhostPoint(STEP, near), GhostPoint(DEEP // 2, half), GhostPoint(DEEP, deep))


def run(
    kit,
    lent: int,
    hisparse: tuple[int, int, int],
    offload: int,
    made: Policy | None = None,
    seconds: int = 60,
    **changes: Any,
):
    """The split after a minute in which ghost totals rose evenly by these tokens a minute."""
    defaults = {
        "requests__running": 4,
        "hisparse__free_blocks": 0,
        "offload__stored_chunks": lent * 18,
    }
    node = kit.change(kit.idle_snapshot(lent=lent), **{**defaults, **changes})
    memory = Memory()
    for second, one in enumerate(kit.held_for(node, seconds, tokens__prompt_total=100)):
        grown = [tokens * second // 60 for tokens in hisparse]
        level = offload * second // 60
        ghosts = kit.change(
            one, hisparse__ghost=curve(*grown), offload__ghost=curve(level, level, level)
        )
        decision, memory = decide(made or policy(), ghosts, memory)
    return decision.of(Lever.SPLIT)


@pytest.mark.parametrize(
    ("hisparse", "offload", "reason", "wanted"),
    [
        ((0, 0, 0), 6_000, Reason.OFFLOAD_WORTH_MORE, 1_100),
        ((0, 0, 0), 999, Reason.IN_DEAD_BAND, 1_000),
        ((5_000, 5_000, 5_000), 6_499, Reason.IN_DEAD_BAND, 1_000),
        ((5_000, 5_000, 5_000), 6_540, Reason.OFFLOAD_WORTH_MORE, 1_100),
        ((6_000, 20_000, 40_000), 0, Reason.HISPARSE_WORTH_MORE, 900),
        ((6_499, 20_000, 40_000), 5_000, Reason.IN_DEAD_BAND, 1_000),
        ((6_000, 20_000, 21_740), 0, Reason.NO_BENEFIT, 1_000),
        ((6_000, 20_000, 21_860), 0, Reason.HISPARSE_WORTH_MORE, 900),
    ],
)
def test_least_gain_noise_margin_and_slack(
    kit, hisparse: tuple[int, int, int], offload: int, reason: Reason, wanted: int
) -> None:
    split = run(kit, 1_000, hisparse, offload)
    assert (split.reason, split.wanted) == (reason, wanted)


RISING = (6_000, 20_000, 40_000)


@pytest.mark.parametrize(
    ("lent", "reason", "wanted"),
    [
        (558, Reason.OFFLOAD_SHORT_OF_REACH, 657),
        (559, Reason.LIMITED_BY_FLOOR, 559),
        (591, Reason.LIMITED_BY_FLOOR, 591),
        (640, Reason.HISPARSE_WORTH_MORE, 591),
    ],
)
def test_equal_reach_without_margin_is_the_floor(
    kit, lent: int, reason: Reason, wanted: int
) -> None:
    """527 blocks are equal reach; shortage is judged one dead band of 32 above, savings two."""
    split = run(kit, lent, RISING, 0)
    assert (split.reason, split.wanted) == (reason, wanted)


def test_a_shortage_waits_for_no_window(kit) -> None:
    assert run(kit, 400, RISING, 0, seconds=0).reason is Reason.OFFLOAD_SHORT_OF_REACH


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hisparse__free_blocks": 100}, Reason.NO_BENEFIT),
        ({"draining_blocks": 1}, Reason.SETTLING),
    ],
)
def test_guards_hold_measured_savings_too(kit, changes: dict[str, int], reason: Reason) -> None:
    split = run(kit, 1_000, RISING, 0, **changes)
    assert split.reason is reason
    assert split.wanted == split.current


def test_growth_is_pointless_while_the_offload_pool_has_room(kit) -> None:
    node = {"offload__capacity_chunks": 1_000 * 18 + 1_800}
    assert run(kit, 1_000, (0, 0, 0), 6_000, **node).reason is Reason.NO_BENEFIT


def test_measured_growth_is_slow_unlike_safety(kit) -> None:
    split = run(kit, 1_000, (0, 0, 0), 60_000, policy(step="1%", step_towards_safety="20%"))
    assert split.wanted == 1_100


@pytest.mark.parametrize(("extra", "served"), [(0, 0), (50, 40), (100, 80), (300, 120), (9e3, 160)])
def test_between_points_in_proportion_beyond_them_level(extra: float, served: float) -> None:
    points = (GhostPoint(100, 80), GhostPoint(500, 160))
    assert served_with(points, int(extra)) == served


def test_no_ghost_list_is_unknown_not_nothing() -> None:
    assert served_with((), 100) is None


# --- what was expected, and what came of it --------------------------------------------------


def judged(kit, made: Policy, arrives: bool):
    """A shortage is put right, and a minute later the blocks have arrived, or not."""
    node = kit.change(kit.idle_snapshot(lent=300), requests__running=4)
    decision, memory = decide(made, node, Memory())
    moved = decision.of(Lever.SPLIT)
    target = decision.commands.offload_target_blocks
    assert target is not None
    lent = target if arrives else 300
    for second in range(1, 62):
        after = kit.change(
            kit.idle_snapshot(lent=lent), at_s=node.at_s + second, requests__running=4
        )
        after = kit.change(after, offload__target_blocks=target)
        decision, memory = decide(made, after, memory)
        if "was to bring" in decision.of(Lever.SPLIT).sentence:
            return moved, second, decision.of(Lever.SPLIT), memory
    raise AssertionError("the move was never judged")


@pytest.mark.parametrize("arrives", [True, False])
def test_a_move_is_judged_after_a_window_by_the_reach_it_brought(kit, arrives: bool) -> None:
    moved, second, after, memory = judged(kit, Policy(version=1), arrives)
    assert "that should add 252352 tokens of reach" in moved.sentence
    assert second == 60
    assert after.figures["expected_reach_tokens"] == 252_352 == 9_343 * 64 - 300 * 18 * 64
    share = after.figures["realised_reach_tokens"] / after.figures["expected_reach_tokens"]
    assert share == (1.0 if arrives else 0.0)
    assert after.figures["effective_moves_ratio"] == float(arrives)
    assert memory.split.undone == (0 if arrives else 1)
    assert f"and brought {after.figures['realised_reach_tokens']:.0f}" in after.sentence


def test_the_verdict_is_said_once(kit) -> None:
    _, _, after, memory = judged(kit, Policy(version=1), arrives=True)
    assert "was to bring" in after.sentence
    node = kit.change(kit.idle_snapshot(lent=657), at_s=2_000.0, requests__running=4)
    later, _ = decide(Policy(version=1), node, memory)
    assert "was to bring" not in later.of(Lever.SPLIT).sentence
    assert "realised_reach_tokens" in later.of(Lever.SPLIT).figures


def test_steps_of_one_way_are_judged_as_one(kit) -> None:
    made, memory, at_s, lent = Policy(version=1), Memory(), 1_000.0, 60
    while lent < 625:
        node = kit.change(kit.idle_snapshot(lent=lent), at_s=at_s, requests__running=4)
        decision, memory = decide(made, node, memory)
        lent = decision.commands.offload_target_blocks or lent
        at_s += 5
    assert memory.expectation is not None
    assert (memory.expectation.from_blocks, memory.expectation.to_blocks) == (100, 657)
    assert memory.expectation.expected == pytest.approx((9_343 - 100 * 18) * 64, abs=64)


def test_an_engine_that_began_anew_is_judged_by_nothing_old(kit) -> None:
    node = kit.change(kit.idle_snapshot(lent=300), requests__running=4, tokens__prompt_total=9)
    _, memory = decide(Policy(version=1), node, Memory())
    assert memory.expectation is not None
    again = kit.change(kit.idle_snapshot(lent=657), at_s=node.at_s + 1)
    _, memory = decide(Policy(version=1), again, memory)
    assert memory.expectation is None
    assert dataclasses.replace(memory.split, undone=0) == memory.split


def test_a_measured_move_that_turns_counts_against_both_ways() -> None:
    """A load on the edge is probed ever less often; what was given for safety is no probe."""
    up_down = MoveHistory().moved(1, Direction.SAFETY, probing=True)
    up_down = up_down.moved(2, Direction.THRIFT, probing=True)
    down_up = MoveHistory().moved(1, Direction.THRIFT, probing=True)
    down_up = down_up.moved(2, Direction.SAFETY, probing=True)
    assert (up_down.undone, down_up.undone) == (1, 1)
    assert down_up.last_safety_at_s is None
    assert MoveHistory().moved(1, Direction.SAFETY).moved(2, Direction.THRIFT).undone == 0
