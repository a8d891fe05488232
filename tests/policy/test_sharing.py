"""Sharing the hot budget by marginal gain: conservation, bounds, and the best split found."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.sharing import misses_at, share_hot_budget
from hisparsed.policy.signals import LeasePoint, Lever, RequestHot
from tests.examples import examples

BLOCKS = (8, 16, 24, 32, 48, 64)


def request(name: str, misses: tuple[float, ...], held: int = 32, weight: float = 1.0):
    curve = tuple(LeasePoint(at, count) for at, count in zip(BLOCKS, misses, strict=False))
    return RequestHot(name, held, held, curve, weight)


STEEP = (900, 500, 250, 100, 20, 0)
FLAT = (60, 58, 56, 55, 54, 53)
CLIFF = (500, 500, 500, 500, 500, 0)
"""Nothing helps until everything fits: only lookahead sees it."""


def shared(requests: list[RequestHot], budget: int, change: int = 100):
    return share_hot_budget(
        requests, budget, floor_blocks=8, ceiling_blocks=64, max_change_blocks=change
    )


def test_blocks_go_where_they_save_most() -> None:
    result = shared([request("a", STEEP), request("b", FLAT)], 64)
    assert result.leases == {"a": 56, "b": 8}
    assert result.misses_after < result.misses_before


def test_lookahead_sees_across_a_plateau() -> None:
    result = shared([request("a", CLIFF), request("b", FLAT)], 72)
    assert result.leases == {"a": 64, "b": 8}


def test_a_heavier_request_wins_between_equals() -> None:
    result = shared([request("a", STEEP), request("b", STEEP, weight=3.0)], 56)
    assert result.leases["b"] > result.leases["a"]


def test_change_is_bounded_both_ways() -> None:
    result = shared([request("a", STEEP), request("b", FLAT)], 64, change=4)
    assert result.leases == {"a": 36, "b": 28}


def test_what_saves_nothing_stays_where_it_is() -> None:
    level = (5.0,) * len(BLOCKS)
    result = shared([request("a", level, held=40), request("b", level, held=24)], 64)
    assert result.leases == {"a": 40, "b": 24}


def test_a_smaller_budget_outranks_the_bound_on_change() -> None:
    result = shared([request(name, STEEP, held=64) for name in "abc"], 30, change=4)
    assert sum(result.leases.values()) <= 30
    assert min(result.leases.values()) >= 8


def test_on_convex_curves_no_split_is_better() -> None:
    """Against every split in steps of 8 blocks."""
    rng = random.Random(2)
    for _ in range(20):
        requests = []
        for name in "abc":
            drops = sorted((rng.random() * 100 for _ in BLOCKS), reverse=True)
            steps = [
                drop * (one - two)
                for drop, (two, one) in zip(drops, itertools.pairwise((0, *BLOCKS)), strict=True)
            ]
            misses = tuple(sum(steps[index + 1 :]) for index in range(len(BLOCKS)))
            requests.append(request(name, misses))
        found = shared(requests, 96).misses_after
        best = min(
            sum(misses_at(one.curve, at) for one, at in zip(requests, split, strict=True))
            for split in itertools.product(range(8, 65, 8), repeat=3)
            if sum(split) <= 96
        )
        assert found <= best + 1e-6


CURVES = st.lists(st.floats(0, 1_000), min_size=1, max_size=len(BLOCKS))


@pytest.mark.examples
@settings(max_examples=examples(50, 200), deadline=None, derandomize=True)
@given(
    curves=st.lists(
        st.tuples(CURVES, st.integers(8, 64), st.floats(0.1, 4)), min_size=1, max_size=9
    ),
    spare=st.integers(0, 400),
    change=st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_conservation_bounds_and_order(curves, spare: int, change: int, seed: int) -> None:
    requests = [
        request(f"r{index}", tuple(misses), held, weight)
        for index, (misses, held, weight) in enumerate(curves)
    ]
    budget = 8 * len(requests) + spare
    result = shared(requests, budget, change)
    assert sum(result.leases.values()) <= budget
    assert all(8 <= blocks <= 64 for blocks in result.leases.values())
    if sum(max(8, one.target_blocks - change) for one in requests) <= budget:
        for one in requests:
            assert abs(result.leases[one.request_id] - one.target_blocks) <= change
    random.Random(seed).shuffle(requests)
    assert shared(requests, budget, change) == result


@pytest.mark.parametrize(
    ("requests", "budget", "words"),
    [
        ([request("a", STEEP), request("b", STEEP)], 15, "must be at least 16"),
        ([RequestHot("a", 8, 8)], 64, "a has no miss curve"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    requests: list[RequestHot], budget: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shared(requests, budget)


# --- the lever -----------------------------------------------------------------------------


def policy(**hot: Any) -> Policy:
    return Policy.model_validate({"version": 1, "hot": {"sharing": "marginal-gain", **hot}})


@pytest.fixture
def unequal(kit):
    """Two requests at 2x on a node where the multiplier itself has nothing to do."""

    # 2x is 64 blocks here, so curves reach from 32 blocks (1x) to 128.
    def curve(*misses: float) -> tuple[LeasePoint, ...]:
        points = zip((32, 48, 64, 96, 128), misses, strict=True)
        return tuple(LeasePoint(at, count) for at, count in points)

    return kit.change(
        kit.idle_snapshot(),
        gpu__free_blocks=3_000,
        requests__running=2,
        requests__none=2,
        requests_hot=(
            RequestHot("a", 64, 64, curve(900, 500, 250, 100, 20)),
            RequestHot("b", 64, 64, curve(60, 58, 56, 55, 54)),
        ),
    )


def of_multiplier(made: Policy, snapshot, memory: Memory | None = None):
    decision, after = decide(made, snapshot, memory or Memory())
    return decision, decision.of(Lever.MULTIPLIER), after


def test_unequal_requests_are_shared_anew_within_the_change(unequal) -> None:
    decision, lever, _ = of_multiplier(policy(), unequal)
    assert (lever.reason, lever.wanted) == (Reason.SHARED_BY_GAIN, 2.0)
    assert decision.commands.hot_leases == {"a": 80, "b": 48}
    assert decision.commands.multiplier is None
    assert lever.figures["misses_per_step"] == 306
    assert lever.figures["misses_per_step_shared_anew"] == pytest.approx(175 + 58)


def test_sharing_waits_its_window_out(kit, unequal) -> None:
    _, _, memory = of_multiplier(policy(), unequal)
    for after_s, reason in ((9.9, Reason.IN_DEAD_BAND), (10.0, Reason.SHARED_BY_GAIN)):
        later = kit.change(unequal, at_s=unequal.at_s + after_s)
        assert of_multiplier(policy(), later, memory)[1].reason is reason


def test_a_small_gain_moves_nothing(unequal) -> None:
    decision, lever, _ = of_multiplier(policy(sharing_gain="50%"), unequal)
    assert lever.reason is Reason.IN_DEAD_BAND
    assert lever.figures["misses_per_step"] == 306
    assert not decision.commands


def test_even_is_the_default_and_the_way_back(kit, unequal) -> None:
    even = Policy(version=1)
    assert of_multiplier(even, unequal)[1].reason is Reason.IN_DEAD_BAND
    apart = kit.change(unequal, hot__individual_leases=2)
    decision, lever, _ = of_multiplier(even, apart)
    assert (lever.reason, decision.commands.hot_leases) == (Reason.POLICY_VALUE, {})


def test_without_curves_requests_share_evenly(kit, unequal) -> None:
    blind = tuple(dataclasses.replace(one, curve=()) for one in unequal.requests_hot)
    unmeasured = kit.change(unequal, requests_hot=blind)
    assert of_multiplier(policy(), unmeasured)[1].reason is Reason.IN_DEAD_BAND
    apart = kit.change(unmeasured, hot__individual_leases=1)
    assert of_multiplier(policy(), apart)[0].commands.hot_leases == {}


def test_a_request_that_has_just_begun_keeps_its_lease(kit, unequal) -> None:
    begun = kit.change(unequal, requests_hot=(*unequal.requests_hot, RequestHot("c", 64, 64)))
    leases = of_multiplier(policy(), begun)[0].commands.hot_leases
    assert leases == {"a": 80, "b": 48}


def test_a_change_of_the_multiplier_comes_first(kit, unequal) -> None:
    outside = kit.change(unequal, hot__multiplier=5.0)
    decision, lever, _ = of_multiplier(policy(), outside)
    assert (lever.reason, decision.commands.hot_leases) == (Reason.OUTSIDE_BOUNDS, None)
    assert decision.commands.multiplier == 4.0


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_sharing_obeys_the_mode(unequal, mode: str) -> None:
    made = Policy.model_validate({"version": 1, "mode": mode, "hot": {"sharing": "marginal-gain"}})
    assert not of_multiplier(made, unequal)[0].commands


def test_shares_settle(kit, unequal) -> None:
    """The same curves for ten minutes: a few bounded steps, then no more."""
    snapshot, memory, moved_at = unequal, Memory(), []
    for second in range(600):
        snapshot = kit.change(snapshot, at_s=unequal.at_s + second)
        decision, _, memory = of_multiplier(policy(), snapshot, memory)
        leases = decision.commands.hot_leases
        if leases:
            moved_at.append(second)
            held = tuple(
                dataclasses.replace(one, target_blocks=leases[one.request_id])
                for one in snapshot.requests_hot
            )
            snapshot = kit.change(snapshot, requests_hot=held, hot__individual_leases=2)
    assert moved_at == [0, 10]
    assert [one.target_blocks for one in snapshot.requests_hot] == [96, 32]
