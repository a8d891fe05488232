"""Policy sizes on a node: bounds, start and what is impossible."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.bounds import (
    engine_multiplier,
    highest_multiplier,
    hot_bounds,
    lease_blocks,
    one_request_blocks,
    problems,
    reserve_blocks,
    shared_blocks,
    split_bounds,
    start_blocks,
    start_lease_blocks,
)
from hisparsed.policy.decisions import Reason
from hisparsed.policy.schema import Policy


def policy(**sections: Any) -> Policy:
    return Policy.model_validate({"version": 1, **sections})


def test_shares_and_sizes_become_blocks(kit) -> None:
    block = kit.geometry.host_block_bytes
    made = policy(
        pools={
            "hisparse": {"floor": block * 6_000, "ceiling": "95%"},
            "offload": {"floor": "1%", "ceiling": "50%"},
        }
    )
    bounds = split_bounds(made, kit.geometry)
    assert (bounds.low_blocks, bounds.low_reason) == (500, Reason.LIMITED_BY_CEILING)
    assert (bounds.high_blocks, bounds.high_reason) == (4_000, Reason.LIMITED_BY_FLOOR)


def test_one_request_outranks_the_offload_floor(kit) -> None:
    tiny = dataclasses.replace(kit.geometry, budget_blocks=300)
    made = policy(pools={"hisparse": {"floor": 0}, "offload": {"floor": "50%"}})
    assert one_request_blocks(tiny) == 258
    assert split_bounds(made, tiny).high_blocks == 42
    assert split_bounds(made, tiny).low_blocks == 42
    assert "lower pools.offload.floor to at most 42 blocks" in problems(made, tiny)[0]


def test_start_follows_either_pool_or_the_law(kit) -> None:
    assert start_blocks(policy(pools={"offload": {"start": "40%"}}), kit.geometry) == 4_000
    assert start_blocks(policy(pools={"hisparse": {"start": "60%"}}), kit.geometry) == 4_000
    # Equal reach with 20 % margin is 625 blocks; the dead band of 5 % lies above it.
    assert start_blocks(policy(), kit.geometry) == 625 + 32


def test_start_is_kept_in_bounds(kit) -> None:
    made = policy(pools={"offload": {"ceiling": "10%"}, "hisparse": {"start": "2GiB", "floor": 0}})
    assert start_blocks(made, kit.geometry) == 1_000


def test_multiplier_in_whole_hot_blocks(kit) -> None:
    odd = dataclasses.replace(kit.geometry, topk=100)
    bounds = hot_bounds(policy(hot={"min": 1.0, "max": 4.0, "step": 0.5, "start": 2}), odd)
    assert (bounds.min_blocks, bounds.max_blocks, bounds.step_blocks) == (2, 6, 1)
    assert lease_blocks(odd, 1.28) == 2
    assert lease_blocks(odd, 1.29) == 3


def test_multiplier_never_above_what_the_node_leases(kit) -> None:
    narrow = dataclasses.replace(kit.geometry, max_lease_blocks=40)
    assert hot_bounds(policy(), narrow).max_blocks == 40


@pytest.mark.parametrize(
    ("sections", "geometry"),
    [
        ({"hot": {"step": 5}}, {}),
        ({"watermark": {"value": 20_000}}, {}),
        ({"admission": {"max_context": 16_384}}, {}),
        ({"hot": {"min": 1}}, {"decode_query_len": 4, "min_lease_rows": 2_048}),
        ({"hot": {"min": 1}}, {"decode_query_len": 4}),
        ({"hot": {"max": 4, "step": 0.5}}, {"decode_query_len": 4}),
        ({"hot": {"min": 1}}, {"topk": 100}),
        ({"pools": {"offload": {"floor": "10%"}, "reserve": "40%"}}, {}),
    ],
)
def test_what_just_fits_is_no_problem(
    kit, sections: dict[str, Any], geometry: dict[str, int]
) -> None:
    assert problems(policy(**sections), dataclasses.replace(kit.geometry, **geometry)) == ()


def test_the_multiplier_may_go_down_to_top_k_where_scratch_takes_the_rest(kit) -> None:
    """Four rows per step: 1x top-k is a quarter of what they may select."""
    four = dataclasses.replace(kit.geometry, decode_query_len=4, max_lease_blocks=640)
    scratch = dataclasses.replace(four, min_lease_rows=four.topk)
    assert hot_bounds(policy(), four).min_blocks == 128
    assert hot_bounds(policy(), scratch).min_blocks == 32
    assert hot_bounds(policy(hot={"min": 2}), scratch).min_blocks == 64


@pytest.mark.parametrize(("rows", "start", "most"), [(1, 2, 4), (4, 5, 10)])
def test_auto_goes_by_what_vllm_itself_reserves(kit, rows: int, start: int, most: int) -> None:
    node = dataclasses.replace(kit.geometry, decode_query_len=rows, max_lease_blocks=640)
    assert start_lease_blocks(policy(), node) == start * 32
    assert hot_bounds(policy(), node).max_blocks == most * 32
    assert highest_multiplier(policy(), rows) == most


@pytest.mark.parametrize("mode", ["off", "advise"])
def test_auto_is_vllms_own_where_the_lever_may_not_act(kit, mode: str) -> None:
    """The engine begins with the highest, and nothing would bring it down."""
    still = policy(levers={"multiplier": {"mode": mode}})
    assert engine_multiplier(still, 4) == 5
    assert engine_multiplier(policy(), 4) == highest_multiplier(still, 4) == 10
    assert engine_multiplier(policy(hot={"max": 8}, levers=still.levers.model_dump()), 4) == 8


def test_numbers_are_in_top_k_with_drafts_as_without(kit) -> None:
    made = policy(hot={"start": 3, "max": 6, "step": 1})
    for rows in (1, 4):
        node = dataclasses.replace(
            kit.geometry, decode_query_len=rows, max_lease_blocks=640, min_lease_rows=2_048
        )
        assert start_lease_blocks(made, node) == 3 * 32
        bounds = hot_bounds(made, node)
        assert (bounds.max_blocks, bounds.step_blocks) == (6 * 32, 32)
        assert highest_multiplier(made, rows) == 6


def test_start_is_no_less_than_a_step_needs_and_no_more_than_the_node_leases(kit) -> None:
    four = dataclasses.replace(kit.geometry, decode_query_len=4)
    assert start_lease_blocks(policy(hot={"start": 2}), four) == 4 * 32
    narrow = dataclasses.replace(kit.geometry, max_lease_blocks=40)
    assert start_lease_blocks(policy(), narrow) == 40


def test_the_reserve_is_neither_pools(kit) -> None:
    made = policy(pools={"reserve": "20%"})
    assert reserve_blocks(made, kit.geometry) == 2_000
    assert shared_blocks(made, kit.geometry) == 8_000
    assert split_bounds(made, kit.geometry).high_blocks == 3_000
    # Equal reach with margin of 8,000 blocks, and a dead band of 25.
    assert start_blocks(made, kit.geometry) == 500 + 25


def test_one_request_outranks_the_reserve(kit) -> None:
    tiny = dataclasses.replace(kit.geometry, budget_blocks=300)
    made = policy(pools={"hisparse": {"floor": 0}, "offload": {"floor": 0}, "reserve": "90%"})
    assert reserve_blocks(made, tiny) == 300 - 258


@pytest.mark.parametrize(
    ("pools", "bound", "words"),
    [
        ({"hisparse": {"ceiling": "80%"}}, "low", "the HiSparse pool's ceiling"),
        ({"offload": {"floor": "20%"}}, "low", "the offload pool's floor"),
        ({"offload": {"ceiling": "20%"}}, "high", "the offload pool's ceiling"),
        ({"hisparse": {"floor": "90%"}}, "high", "the HiSparse pool's floor"),
        (
            {"hisparse": {"floor": 0}, "offload": {"ceiling": 1}},
            "high",
            "one request at max_model_len",
        ),
    ],
)
def test_a_bound_is_called_by_what_sets_it(
    kit, pools: dict[str, Any], bound: str, words: str
) -> None:
    assert getattr(split_bounds(policy(pools=pools), kit.geometry), f"{bound}_words") == words


def test_shipped_defaults_have_no_problem(kit) -> None:
    assert problems(policy(), kit.geometry) == ()


@pytest.mark.parametrize(
    ("sections", "geometry", "words"),
    [
        ({}, {"budget_blocks": 200}, "one request at max_model_len needs 258"),
        (
            {"pools": {"hisparse": {"floor": "60%", "ceiling": "1GiB"}}},
            {},
            "pools.hisparse.ceiling 327; the ceiling must be at least the floor",
        ),
        (
            {"pools": {"hisparse": {"floor": "60%"}, "offload": {"floor": "15GiB"}}},
            {},
            "lower pools.offload.floor to at most 4000 blocks",
        ),
        (
            {"pools": {"hisparse": {"floor": 0, "ceiling": "1GiB"}}},
            {},
            "they must cover the budget of 10000",
        ),
        ({"hot": {"min": 2}}, {"max_lease_blocks": 33}, "can lease at most 1.03125x; lower it"),
        (
            {"hot": {"max": 3}},
            {"decode_query_len": 4},
            "hot.max is 3, but a step on this node needs 8192 hot rows; raise hot.max "
            "to at least 4, or write auto",
        ),
        ({"hot": {"step": 1_000}}, {}, "hot.step is 1000, more than the 5x that this node can"),
        ({"watermark": {"value": 20_001}}, {}, "but the GPU pool has 20000"),
        ({"admission": {"max_context": 16_385}}, {}, "but the model ends at 16384"),
        (
            {
                "pools": {
                    "hisparse": {"floor": "60%"},
                    "offload": {"floor": "10%"},
                    "reserve": "15GiB",
                }
            },
            {},
            "lower pools.reserve to at most 3000 blocks",
        ),
    ],
)
def test_problems_name_keys_values_and_what_is_right(
    kit, sections: dict[str, Any], geometry: dict[str, int], words: str
) -> None:
    found = problems(policy(**sections), dataclasses.replace(kit.geometry, **geometry))
    assert any(words in problem for problem in found), found


def test_a_hisparse_floor_above_the_budget_is_named_itself(kit) -> None:
    made = policy(pools={"hisparse": {"floor": "10TiB", "ceiling": "20TiB"}})
    (found,) = problems(made, kit.geometry)
    assert found.startswith("pools.hisparse.floor is ")
    assert "lower it to at most" in found
