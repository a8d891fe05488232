"""Policy sizes on a node: bounds, start and what is impossible."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.bounds import (
    hot_bounds,
    lease_blocks,
    one_request_blocks,
    problems,
    split_bounds,
    start_blocks,
)
from hisparsed.policy.reasons import Reason
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
    ],
)
def test_problems_name_keys_values_and_what_is_right(
    kit, sections: dict[str, Any], geometry: dict[str, int], words: str
) -> None:
    found = problems(policy(**sections), dataclasses.replace(kit.geometry, **geometry))
    assert any(words in problem for problem in found), found
