"""Reach and the equal-reach split, against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsed.policy.reach import (
    Reach,
    equal_reach_blocks,
    live_load,
    occupied_tokens,
    reach_at,
    reach_now,
)
from hisparsed.policy.signals import PoolGeometry
from tests.examples import examples

PERCENT = st.integers(0, 100).map(lambda percent: percent / 100)


@st.composite
def geometries(draw: st.DrawFn) -> PoolGeometry:
    block_tokens = draw(st.sampled_from([16, 64]))
    copies = draw(st.sampled_from([1, 8]))
    chunk_bytes = draw(st.integers(1_000, 200_000))
    per_block = draw(st.integers(1, 40))
    return PoolGeometry(
        block_tokens=block_tokens,
        host_block_bytes=per_block * copies * chunk_bytes + draw(st.integers(0, chunk_bytes)),
        offload_chunk_tokens=block_tokens * draw(st.sampled_from([1, 4])),
        offload_chunk_bytes=chunk_bytes,
        offload_copies=copies,
        chunks_per_host_block=per_block,
        budget_blocks=draw(st.integers(50, 200_000)),
        max_model_len=512,
        topk=64,
        decode_query_len=1,
        gpu_blocks_total=1_000,
        hot_block_rows=16,
        hot_groups=2,
        max_lease_blocks=20,
        max_num_seqs=16,
        row_bytes=100,
    )


@pytest.mark.examples
@settings(max_examples=examples(60, 300), deadline=None, derandomize=True)
@given(geometries(), PERCENT, st.floats(0, 1), st.integers(0, 500))
def test_equal_reach_is_the_fewest_blocks_that_satisfy_the_law(
    geometry: PoolGeometry, margin: float, in_use_share: float, in_flight: int
) -> None:
    in_use = int(in_use_share * geometry.budget_blocks)
    blocks = equal_reach_blocks(geometry, margin, in_use, in_flight)

    def satisfied(lent: int) -> bool:
        reach = reach_at(geometry, lent, in_use, in_flight)
        capacity = lent * geometry.chunks_per_host_block * geometry.offload_chunk_tokens
        fits = capacity >= occupied_tokens(geometry, in_use, in_flight)
        return fits and reach.offload_tokens >= reach.hisparse_tokens * (1 + margin) - 1e-3

    assert satisfied(blocks) or blocks == geometry.budget_blocks
    assert blocks == 0 or not satisfied(blocks - 1)


@pytest.mark.examples
@settings(max_examples=examples(40, 200), deadline=None, derandomize=True)
@given(geometries(), PERCENT, st.integers(0, 5_000), st.integers(0, 500))
def test_need_falls_with_use_and_rises_with_transfers(
    geometry: PoolGeometry, margin: float, in_use: int, in_flight: int
) -> None:
    need = equal_reach_blocks(geometry, margin, in_use, in_flight)
    busier = equal_reach_blocks(geometry, margin, in_use + 1, in_flight)
    crowded = busier >= geometry.budget_blocks - in_use - 1
    assert busier <= need or crowded
    assert equal_reach_blocks(geometry, margin, in_use, in_flight + 1) >= need


def test_published_splits(kit) -> None:
    """51 KB a token against 2.8 KB a copy: about 5 % with one copy, about 30 % with eight."""
    one = equal_reach_blocks(kit.geometry, 0.0, 0, 0) / kit.geometry.budget_blocks
    stock = dataclasses.replace(kit.geometry, offload_copies=8, chunks_per_host_block=2)
    eight = equal_reach_blocks(stock, 0.0, 0, 0) / stock.budget_blocks
    assert one == pytest.approx(0.053, abs=0.001)
    assert eight == pytest.approx(0.333, abs=0.001)


def test_running_requests_take_room_in_both_pools(kit) -> None:
    idle = kit.idle_snapshot(lent=1_000)
    busy = kit.change(idle, hisparse__in_use_blocks=3_000)
    assert reach_now(idle) == Reach(9_000 * 64, 18_000 * 64)
    assert reach_now(busy) == Reach(6_000 * 64, 15_000 * 64)


def test_reach_is_never_negative(kit) -> None:
    crowded = kit.change(kit.idle_snapshot(lent=10), hisparse__in_use_blocks=10_000)
    assert reach_now(crowded) == Reach(0, 0)
    assert reach_now(crowded).min_tokens == 0


def test_load_counts_sessions_that_do_not_run(kit) -> None:
    busy = kit.change(
        kit.idle_snapshot(lent=1_000),
        hisparse__in_use_blocks=3_000,
        sessions__live_set_tokens=6_000 * 64,
    )
    assert live_load(busy, reach_now(busy)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_tokens", 0, "geometry.block_tokens is 0; it must be at least 1"),
        ("budget_blocks", -4, "geometry.budget_blocks is -4; it must be at least 1"),
        ("offload_copies", 8, "with 8 copies that is"),
    ],
)
def test_impossible_geometry_is_refused(kit, field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(kit.geometry, **{field: value})
