"""Scratch blocks: the first of the pool, taken once, and no part of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import TOPK, EngineShape, apply, build_engine, core_of, report
from vllm.v1.core.block_pool import BlockPool

from hisparsed.config.reference import ReferenceConfig
from hisparsed.engine.reference.launch import max_lease_rows, slab_blocks_of_one_request
from hisparsed.engine.scratch import lease_scratch, scratch_block_count, scratch_block_ids

pytestmark = pytest.mark.engine


def pool_of(blocks: int) -> Any:
    return BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)


def count_for(query_len: int, max_num_seqs: int) -> int:
    return scratch_block_count(
        query_len=query_len, topk=64, block_tokens=16, max_num_seqs=max_num_seqs
    )


def test_one_row_a_request_needs_no_scratch() -> None:
    assert count_for(query_len=1, max_num_seqs=64) == 0


def test_scratch_holds_the_worst_spills_of_four_requests_or_of_all() -> None:
    assert count_for(query_len=4, max_num_seqs=64) == 4 * 3 * 64 // 16
    assert count_for(query_len=4, max_num_seqs=2) == 2 * 3 * 64 // 16


def test_pool_is_smaller_but_empty_after_the_lease() -> None:
    pool = pool_of(50)
    lease_scratch(pool, 10)
    assert pool.get_num_free_blocks() == 39
    assert pool.get_usage() == 0.0
    assert pool.reset_prefix_cache()
    given = {block.block_id for block in pool.get_new_blocks(39)}
    assert given == set(range(1, 50)) - set(scratch_block_ids(10))


def test_a_pool_that_gave_blocks_before_is_refused() -> None:
    pool = pool_of(50)
    pool.get_new_blocks(1)
    with pytest.raises(RuntimeError, match="must be the first 10 of the GPU pool, which gave 2"):
        lease_scratch(pool, 10)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("engine"), EngineShape(speculative_tokens=3))


def test_report_counts_the_scratch_and_the_least_lease(engine: Any) -> None:
    geometry = report(engine)["geometry"]
    assert geometry["scratch_blocks"] == 48
    assert geometry["min_lease_rows"] == TOPK
    assert geometry["decode_query_len"] == 4
    assert report(engine)["gpu_free_blocks"] == geometry["gpu_blocks"] - 1 - 48


def test_least_multiplier_is_one_topk_for_all_rows_of_a_step(engine: Any) -> None:
    assert apply(engine, {"multiplier": 1.0})["lease_blocks"] == TOPK // 16
    with pytest.raises(ValueError, match=r"below 64 hot rows.*at least 1"):
        apply(engine, {"multiplier": 0.96})


def test_an_idle_engine_can_reset_its_prefix_cache(engine: Any) -> None:
    assert core_of(engine).scheduler.kv_cache_manager.block_pool.reset_prefix_cache()


def test_slab_needs_room_for_scratch_and_for_the_leases_of_all_rows() -> None:
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    plain = ReferenceConfig(**sizes)
    speculative = ReferenceConfig(**sizes, speculative_tokens=3)
    more_lease = 2 * (4 - 2) * 64 // 16
    assert (
        slab_blocks_of_one_request(speculative, 2.0)
        == slab_blocks_of_one_request(plain, 2.0) + more_lease + 48
    )


def test_largest_lease_is_never_below_what_vllm_asks_for() -> None:
    speculative = ReferenceConfig(speculative_tokens=3)
    assert max_lease_rows(speculative, 1.0) == 4 * 64
    assert max_lease_rows(speculative, 5.0) == 5 * 64
