"""The split lever: every reason at its edge, one by one, and whether a move brought what it should.

At the default policy and the test geometry equal reach with margin needs 625 blocks on an
idle node. Marginal value is tested at its edges; against real pools it is in test_closed_loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.forecasts import Figure
from hisparsed.policy.memory import Direction, Memory, MoveHistory
from hisparsed.policy.reach import served_with
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint, Lever
from hisparsed.policy.split import propose_split

NEED, BAND = 625, 32
SHORT, BEYOND = Reason.OFFLOAD_SHORT_OF_REACH, Reason.OFFLOAD_BEYOND_REACH


def policy(**sections: Any) -> Policy:
    return Policy.model_validate({"version": 1, **sections})


def busy_snapshot(kit, lent: int, **changes: Any):
    """Requests run, HiSparse is full of reusable prefix, nothing is in use."""
    hisparse = kit.geometry.budget_blocks - lent
    defaults = {
        "requests__running": 4,
        "hisparse__cached_blocks": hisparse,
        "hisparse__free_blocks": 0,
    }
    return kit.change(kit.idle_snapshot(lent=lent), **{**defaults, **changes})


def last(kit, made: Policy, snapshot, seconds: int = 60, memory: Memory | None = None):
    """The split decision after ``seconds`` of the same snapshot, nothing applied."""
    memory = memory or Memory()
    for one in kit.held_for(snapshot, seconds, tokens__prompt_total=100):
        decision, following = decide(made, one, memory)
        # Acting is not applied here, so a move must not count as one.
        if decision.of(Lever.SPLIT).acts:
            following = dataclasses.replace(
                following, split=memory.split, expectations=memory.expectations
            )
        memory = following
    return decision.of(Lever.SPLIT)


@pytest.mark.parametrize(
    ("lent", "reason", "wanted"),
    [
        (NEED - 1, SHORT, NEED + BAND),
        (NEED, Reason.IN_DEAD_BAND, NEED),
        (NEED + BAND, Reason.IN_DEAD_BAND, NEED + BAND),
        (NEED + 2 * BAND, Reason.IN_DEAD_BAND, NEED + 2 * BAND),
        (NEED + 2 * BAND + 1, BEYOND, NEED + BAND),
    ],
)
def test_dead_band_edges(kit, lent: int, reason: Reason, wanted: int) -> None:
    decision = last(kit, policy(), busy_snapshot(kit, lent))
    assert (decision.reason, decision.wanted) == (reason, wanted)
    assert decision.figures["need_blocks"] == NEED


def test_absolute_dead_band_widens_a_small_relative_one(kit) -> None:
    wide = policy(rebalance={"dead_band": {"relative": 0, "absolute": "1%"}})
    assert last(kit, wide, busy_snapshot(kit, NEED + 200)).reason is Reason.IN_DEAD_BAND
    assert last(kit, wide, busy_snapshot(kit, NEED + 201)).reason is BEYOND


def test_short_of_reach_acts_at_once_even_idle(kit) -> None:
    decision, _ = decide(policy(), kit.idle_snapshot(lent=300), Memory())
    split = decision.of(Lever.SPLIT)
    assert (split.reason, split.wanted) == (SHORT, 657)
    assert split.limited_by is None
    assert decision.commands.offload_target_blocks == 657
    assert decision.commands.hisparse_target_blocks == 10_000 - 657


def test_step_is_larger_towards_safety(kit) -> None:
    up = last(kit, policy(), busy_snapshot(kit, 100), seconds=0)
    down = last(kit, policy(), busy_snapshot(kit, 4_000))
    assert (up.wanted, up.limited_by) == (600, Reason.LIMITED_BY_STEP)
    assert (down.wanted, down.limited_by) == (3_900, Reason.LIMITED_BY_STEP)
    assert (up.reason, down.reason) == (SHORT, BEYOND)


@pytest.mark.parametrize(("seconds", "reason"), [(59, Reason.WINDOW_NOT_FULL), (60, BEYOND)])
def test_thrift_waits_for_a_full_window(kit, seconds: int, reason: Reason) -> None:
    assert last(kit, policy(), busy_snapshot(kit, 4_000), seconds).reason is reason


def test_thrift_on_an_idle_node_is_no_traffic(kit) -> None:
    idle = busy_snapshot(kit, 4_000, requests__running=0)
    still = kit.reasons_over(policy(), kit.held_for(idle, 60), Lever.SPLIT)
    assert still[-1].reason is Reason.NO_TRAFFIC
    # Traffic in the window is pressure enough, and so is a waiting request.
    assert last(kit, policy(), idle).reason is BEYOND
    waiting = kit.change(idle, requests__waiting=1)
    held = kit.reasons_over(policy(), kit.held_for(waiting, 60), Lever.SPLIT)
    assert held[-1].reason is BEYOND


@pytest.mark.parametrize(("free", "reason"), [(99, BEYOND), (100, Reason.NO_BENEFIT)])
def test_thrift_has_no_benefit_while_hisparse_is_not_full(kit, free: int, reason: Reason) -> None:
    snapshot = busy_snapshot(kit, 4_000, hisparse__free_blocks=free)
    assert last(kit, policy(), snapshot).reason is reason


@pytest.mark.parametrize(
    ("lent", "part", "reason"),
    [
        (300, "pending_blocks", Reason.SETTLING),
        (300, "draining_blocks", SHORT),
        (4_000, "draining_blocks", Reason.SETTLING),
        (4_000, "pending_blocks", BEYOND),
    ],
)
def test_settling_holds_only_moves_the_same_way(kit, lent: int, part: str, reason: Reason) -> None:
    assert last(kit, policy(), busy_snapshot(kit, lent, **{part: 1})).reason is reason


@pytest.mark.parametrize(
    ("lent", "direction", "ago_s", "reason"),
    [
        (300, Direction.SAFETY, 4.9, Reason.COOLING_DOWN),
        (300, Direction.SAFETY, 5.0, SHORT),
        (300, Direction.THRIFT, 5.0, SHORT),
        (4_000, Direction.THRIFT, 59.9, Reason.COOLING_DOWN),
        (4_000, Direction.THRIFT, 60.0, BEYOND),
        (4_000, Direction.SAFETY, 299.9, Reason.HOLD_OFF),
        (4_000, Direction.SAFETY, 300.0, BEYOND),
    ],
)
def test_cool_down_and_hold_off_edges(
    kit, lent: int, direction: Direction, ago_s: float, reason: Reason
) -> None:
    snapshot = busy_snapshot(kit, lent)
    moved = Memory(split=MoveHistory().moved(snapshot.at_s + 60 - ago_s, direction))
    assert last(kit, policy(), snapshot, memory=moved).reason is reason


@pytest.mark.parametrize(
    ("undone", "ago_s", "reason"),
    [
        (1, 119.9, Reason.BACKED_OFF),
        (1, 120.0, BEYOND),
        (2, 239.9, Reason.BACKED_OFF),
        (2, 240.0, BEYOND),
        (9, 959.9, Reason.BACKED_OFF),
        (9, 960.0, BEYOND),
    ],
)
def test_undone_thrift_backs_off_up_to_the_limit(
    kit, undone: int, ago_s: float, reason: Reason
) -> None:
    snapshot = busy_snapshot(kit, 4_000)
    at_s = snapshot.at_s + 60
    history = MoveHistory(at_s - ago_s, Direction.THRIFT, None, undone, at_s - 10)
    assert last(kit, policy(), snapshot, memory=Memory(split=history)).reason is reason


def test_back_off_is_forgotten(kit) -> None:
    snapshot = busy_snapshot(kit, 4_000)
    at_s = snapshot.at_s + 60
    history = MoveHistory(at_s - 60, Direction.THRIFT, None, 4, at_s - 3_600.1)
    assert last(kit, policy(), snapshot, memory=Memory(split=history)).reason is BEYOND


def test_only_thrift_that_safety_takes_back_counts_as_undone() -> None:
    down_up = MoveHistory().moved(1, Direction.THRIFT).moved(2, Direction.SAFETY)
    assert down_up.undone == 1
    assert down_up.moved(3, Direction.SAFETY).undone == 1
    assert down_up.moved(3, Direction.THRIFT).undone == 1


@pytest.mark.parametrize(
    ("sections", "lent", "reason", "wanted"),
    [
        ({"offload": {"ceiling": "4%"}}, 400, Reason.LIMITED_BY_CEILING, 400),
        ({"offload": {"ceiling": "4%"}}, 399, SHORT, 400),
        ({"hisparse": {"floor": "96%"}}, 400, Reason.LIMITED_BY_FLOOR, 400),
        ({"offload": {"floor": "20%"}}, 2_000, Reason.LIMITED_BY_FLOOR, 2_000),
        ({"offload": {"floor": "20%"}}, 2_001, BEYOND, 2_000),
        ({"hisparse": {"ceiling": "80%"}}, 2_000, Reason.LIMITED_BY_CEILING, 2_000),
    ],
)
def test_floors_and_ceilings(
    kit, sections: dict[str, Any], lent: int, reason: Reason, wanted: int
) -> None:
    decision = last(kit, policy(pools=sections), busy_snapshot(kit, lent))
    assert (decision.reason, decision.wanted) == (reason, wanted)


@pytest.mark.parametrize(("lent", "bound"), [(50, 100), (6_000, 5_000)])
def test_outside_bounds_goes_back_at_once(kit, lent: int, bound: int) -> None:
    decision = last(kit, policy(), busy_snapshot(kit, lent), seconds=0)
    assert (decision.reason, decision.wanted) == (Reason.OUTSIDE_BOUNDS, bound)


def test_one_request_at_max_model_len_always_fits(kit) -> None:
    tiny = dataclasses.replace(kit.geometry, budget_blocks=270)
    made = policy(pools={"hisparse": {"floor": 0}})
    lent = 270 - 258
    snapshot = kit.change(kit.idle_snapshot(tiny, lent), requests__running=1)
    decision = last(kit, made, snapshot)
    assert (decision.reason, decision.wanted) == (Reason.LIMITED_BY_FLOOR, lent)


@pytest.mark.parametrize(
    ("in_use", "head", "reason", "wanted"),
    [
        (9_500, 0, Reason.LIMITED_BY_IN_USE, 500),
        (9_499, 0, SHORT, 501),
        (0, 9_500, Reason.LIMITED_BY_IN_USE, 500),
        (0, 9_499, SHORT, 501),
    ],
)
def test_blocks_in_use_and_of_the_queue_head_stay(
    kit, in_use: int, head: int, reason: Reason, wanted: int
) -> None:
    decision = last(
        kit,
        policy(),
        busy_snapshot(kit, 500, hisparse__in_use_blocks=in_use, head_need_blocks=head),
    )
    assert (decision.reason, decision.wanted) == (reason, wanted)


def test_chunks_in_flight_are_not_recalled(kit) -> None:
    busy = busy_snapshot(kit, 4_000, offload__in_use_chunks=4_000 * 18)
    # So many transfers also raise the need; a window without them isolates the limit.
    quiet = busy_snapshot(kit, 4_000)
    memory = Memory()
    for one in kit.held_for(quiet, 60, tokens__prompt_total=1):
        _, memory = decide(policy(mode="advise"), one, memory)
    proposal = propose_split(policy(), kit.change(busy, at_s=one.at_s), memory)
    assert proposal.reason is Reason.LIMITED_BY_IN_USE
    assert proposal.wanted == 4_000


def test_need_follows_the_most_demanding_point_of_the_window(kit) -> None:
    made, memory = policy(), Memory()
    idle = busy_snapshot(kit, 4_000)
    crowded = kit.change(idle, hisparse__in_use_blocks=9_000, at_s=idle.at_s + 1)
    decision, memory = decide(made, idle, memory)
    decision, memory = decide(made, crowded, memory)
    assert decision.of(Lever.SPLIT).figures["need_blocks"] == NEED


def test_fixed_goes_to_the_start_and_stays(kit) -> None:
    made = policy(pools={"offload": {"start": "10%"}}, rebalance={"strategy": "fixed"})
    assert last(kit, made, busy_snapshot(kit, 1_000)).reason is Reason.AT_TARGET
    short = last(kit, made, busy_snapshot(kit, 999))
    assert (short.reason, short.wanted) == (Reason.FIXED_SPLIT, 1_000)
    beyond = last(kit, made, busy_snapshot(kit, 1_001, requests__running=0))
    assert (beyond.reason, beyond.wanted) == (Reason.FIXED_SPLIT, 1_000)


def test_sentence_carries_values_and_reason(kit) -> None:
    decision = last(kit, policy(), busy_snapshot(kit, 300), seconds=0)
    assert decision.sentence == (
        "Lend the offload pool 657 host blocks instead of 300, because 625 are needed "
        "for the HiSparse reach and a margin of 20%, and 300 are too few; that should add 252352 "
        "tokens of reach."
    )


@pytest.mark.parametrize(
    ("pools", "lent", "words"),
    [
        (
            {"hisparse": {"ceiling": "80%"}},
            2_000,
            "the HiSparse pool's ceiling keeps at least 2000",
        ),
        ({"offload": {"ceiling": "4%"}}, 400, "the offload pool's ceiling allows at most 400"),
    ],
)
def test_the_sentence_names_the_bound_and_its_pool(
    kit, pools: dict[str, Any], lent: int, words: str
) -> None:
    assert words in last(kit, policy(pools=pools), busy_snapshot(kit, lent)).sentence


def reserving(kit, **changes: Any):
    made = policy(pools={"reserve": "20%", "release_reserve": True})
    node = busy_snapshot(kit, 525, **changes)
    return decide(made, node, Memory())[0]


def test_a_new_reserve_is_put_in_force_with_both_pools(kit) -> None:
    decision = reserving(kit, reserve__can_release=True)
    commands = decision.commands
    assert decision.of(Lever.SPLIT).reason is Reason.POLICY_VALUE
    assert commands.reserve_target_blocks == 2_000
    assert commands.offload_target_blocks == 525
    assert commands.hisparse_target_blocks == 7_475
    assert commands.release_reserve is True


def test_a_reserve_in_force_is_left_alone(kit) -> None:
    in_force = {
        "reserve__target_blocks": 2_000,
        "reserve__can_release": True,
        "reserve__releasing": True,
    }
    assert reserving(kit, **in_force).of(Lever.SPLIT).reason is Reason.IN_DEAD_BAND
    held = reserving(kit, **{**in_force, "reserve__releasing": False})
    assert held.commands.release_reserve is True


def test_pinned_memory_stays_and_the_sentence_says_so(kit) -> None:
    decision = reserving(kit)
    assert decision.commands.release_reserve is False
    assert "cannot give it back" in decision.of(Lever.SPLIT).sentence
    settled = reserving(kit, reserve__target_blocks=2_000)
    assert settled.of(Lever.SPLIT).reason is Reason.IN_DEAD_BAND


def test_putting_a_reserve_in_force_is_no_move_of_the_split(kit) -> None:
    made = policy(pools={"reserve": "20%"})
    _, memory = decide(made, busy_snapshot(kit, 525), Memory())
    assert memory.split.last_at_s is None


# A step is 1 % of the budget: 100 blocks; a step takes 18 times that from the offload reach.
STEP, DEEP = 100, 1_900


def marginal_policy(**rebalance: Any) -> Policy:
    return Policy.model_validate(
        {"version": 1, "rebalance": {"strategy": "marginal-value", **rebalance}}
    )


def curve(near: int, half: int, deep: int) -> tuple[GhostPoint, ...]:
    return (GhostPoint(STEP, near), GhostPoint(DEEP // 2, half), GhostPoint(DEEP, deep))


def run_marginal(
    kit,
    lent: int,
    hisparse: tuple[int, int, int],
    offload: int,
    made: Policy | None = None,
    seconds: int = 60,
    **changes: Any,
):
    """The split after a minute in which ghost totals rose evenly by these tokens per minute."""
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
        decision, memory = decide(made or marginal_policy(), ghosts, memory)
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
    split = run_marginal(kit, 1_000, hisparse, offload)
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
    split = run_marginal(kit, lent, RISING, 0)
    assert (split.reason, split.wanted) == (reason, wanted)


def test_a_shortage_waits_for_no_window(kit) -> None:
    assert run_marginal(kit, 400, RISING, 0, seconds=0).reason is Reason.OFFLOAD_SHORT_OF_REACH


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hisparse__free_blocks": 100}, Reason.NO_BENEFIT),
        ({"draining_blocks": 1}, Reason.SETTLING),
    ],
)
def test_guards_hold_measured_savings_too(kit, changes: dict[str, int], reason: Reason) -> None:
    split = run_marginal(kit, 1_000, RISING, 0, **changes)
    assert split.reason is reason
    assert split.wanted == split.current


def test_growth_is_pointless_while_the_offload_pool_has_room(kit) -> None:
    node = {"offload__capacity_chunks": 1_000 * 18 + 1_800}
    assert run_marginal(kit, 1_000, (0, 0, 0), 6_000, **node).reason is Reason.NO_BENEFIT


def test_measured_growth_is_slow_unlike_safety(kit) -> None:
    split = run_marginal(
        kit, 1_000, (0, 0, 0), 60_000, marginal_policy(step="1%", step_towards_safety="20%")
    )
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
        if "was expected to add" in decision.of(Lever.SPLIT).sentence:
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
    assert "was expected to add" in after.sentence
    node = kit.change(kit.idle_snapshot(lent=657), at_s=2_000.0, requests__running=4)
    later, _ = decide(Policy(version=1), node, memory)
    assert "was expected to add" not in later.of(Lever.SPLIT).sentence
    assert "realised_reach_tokens" in later.of(Lever.SPLIT).figures


def test_steps_of_one_way_are_judged_as_one(kit) -> None:
    made, memory, at_s, lent = Policy(version=1), Memory(), 1_000.0, 60
    while lent < 625:
        node = kit.change(kit.idle_snapshot(lent=lent), at_s=at_s, requests__running=4)
        decision, memory = decide(made, node, memory)
        lent = decision.commands.offload_target_blocks or lent
        at_s += 5
    expected = memory.expectations[Lever.SPLIT]
    assert (expected.current, expected.wanted) == (100, 657)
    reach = expected.expected[Figure.REACH]
    assert reach == pytest.approx((9_343 - 100 * 18) * 64, abs=64)


def test_an_engine_that_began_anew_is_judged_by_nothing_old(kit) -> None:
    node = kit.change(kit.idle_snapshot(lent=300), requests__running=4, tokens__prompt_total=9)
    _, memory = decide(Policy(version=1), node, Memory())
    assert Lever.SPLIT in memory.expectations
    again = kit.change(kit.idle_snapshot(lent=657), at_s=node.at_s + 1)
    _, memory = decide(Policy(version=1), again, memory)
    assert not memory.expectations
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
