"""The ledger against vLLM's real block pool and the real offloading manager."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hisparsed.engine.host.chunks import ChunkLayout
from hisparsed.engine.host.ledger import HostLedger

LAYOUT = ChunkLayout(layers=8, slice_bytes=2048, chunk_bytes=2176)
PER_BLOCK = LAYOUT.chunks_per_block


def make(blocks: int = 101, floor: int = 10) -> tuple[HostLedger, Any, Any]:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from hisparsed.engine.host.offload import LentOffloadingManager
    from hisparsed.engine.host.pool import CountingHostPool

    owner = BlockPool(num_gpu_blocks=2, enable_caching=True, hash_block_size=16)
    pool = CountingHostPool(
        num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16, event_owner=owner
    )
    pool.start_counting()
    manager = CPUOffloadingManager(num_chunks=0)
    manager.__class__ = LentOffloadingManager
    manager.start_unlent()
    manager.bind_layout(LAYOUT)
    return HostLedger(pool, manager, LAYOUT, floor), pool, manager


def sound(ledger: HostLedger) -> None:
    from hisparsed.engine.host.check import LedgerReader
    from hisparsed.engine.host.invariants import violations

    reader = LedgerReader(ledger, ledger._pool, ledger._borrower)  # type: ignore[arg-type]
    assert violations(reader.of_everything()) == []


def context() -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext("request")


def key(index: int) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(index.to_bytes(32, "big"), 1)


def store(manager: Any, first: int, count: int, *, complete: bool = True) -> Any:
    request = context()
    keys = [key(index) for index in range(first, first + count)]
    output = manager.prepare_store(keys, request)
    if complete and output is not None:
        manager.complete_store(output.keys_to_store, request)
    return output


def test_lends_what_is_free_and_no_more_than_the_floor_allows() -> None:
    ledger, pool, manager = make()
    assert ledger.set_offload_target(1000) == 90
    assert ledger.advance(head_need_blocks=0) == 90
    assert manager.lent_blocks == 90
    assert pool.get_num_free_blocks() == 10
    assert ledger.settled()


def test_blocks_that_drain_count_against_the_floor() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(90)
    ledger.advance(0)
    store(manager, 0, 30 * PER_BLOCK, complete=False)
    ledger.set_offload_target(0)
    assert ledger.advance(0) == -60
    ledger.set_offload_target(90)
    assert ledger.advance(0) == 60
    counts = ledger.counts()
    assert (counts.draining, counts.hisparse_capacity, counts.pending) == (30, 10, 30)
    sound(ledger)


def test_blocks_in_use_are_pending_until_they_free_up() -> None:
    ledger, pool, _ = make()
    held = pool.get_new_blocks(80)
    ledger.set_offload_target(50)
    assert ledger.advance(0) == 20
    assert ledger.counts().pending == 30
    pool.free_blocks(held[:10])
    assert ledger.advance(0) == 10
    assert ledger.counts().pending == 20
    pool.free_blocks(held[10:])
    assert ledger.advance(0) == 20
    assert ledger.counts().pending == 0


def test_the_head_of_the_queue_keeps_what_it_needs() -> None:
    ledger, pool, _ = make()
    pool.get_new_blocks(40)
    ledger.set_offload_target(90)
    assert ledger.advance(head_need_blocks=25) == 35
    assert pool.get_num_free_blocks() == 25


def test_recall_of_idle_blocks_is_at_once_and_coldest_first() -> None:
    ledger, pool, manager = make()
    ledger.set_offload_target(3)
    ledger.advance(0)
    store(manager, 0, 3 * PER_BLOCK)
    # Looking the first block's chunks up makes its block the warmest.
    for index in range(PER_BLOCK):
        manager.lookup(key(index), context())
    ledger.set_offload_target(1)
    assert ledger.advance(0) == -2
    assert manager.stored_chunks == PER_BLOCK
    assert all(manager.lookup(key(index), context()).name == "HIT" for index in range(PER_BLOCK))
    assert pool.get_num_free_blocks() == 99


@pytest.mark.parametrize("seed", range(4))
def test_a_prefix_looked_up_whole_is_what_its_chunks_say_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    ledger, _, manager = make()
    other, _, singly = make()
    for one, of in ((ledger, manager), (other, singly)):
        one.set_offload_target(6)
        one.advance(0)
        order = random.Random(seed).sample(range(4 * PER_BLOCK), 3 * PER_BLOCK)
        for index in order:
            store(of, index, 1, complete=index % 11 != 5)
        # One of its blocks is on its way back: what is found there does not make it warm.
        one.set_offload_target(5)
        one.advance(0)
    for _ in range(50):
        first, count = rng.randrange(4 * PER_BLOCK), rng.randrange(3 * PER_BLOCK)
        keys = [key(index) for index in range(first, first + count)]
        said = []
        for one in keys:
            said.append(singly.lookup(one, context()).name)
            if said[-1] == "MISS":
                break
        hits = sum(one != "MISS" for one in said)
        assert manager.prefix(keys) == (None if "HIT_PENDING" in said else hits)
        assert manager.found == singly.found
        assert list(manager._lent) == list(singly._lent)


def test_blocks_with_a_store_in_flight_drain() -> None:
    ledger, pool, manager = make()
    ledger.set_offload_target(2)
    ledger.advance(0)
    request = context()
    output = manager.prepare_store([key(index) for index in range(PER_BLOCK + 1)], request)
    free = pool.get_num_free_blocks()
    ledger.set_offload_target(0)
    assert ledger.advance(0) == 0
    counts = ledger.counts()
    assert (counts.draining, counts.lent) == (2, 2)
    assert manager.prepare_store([key(1000)], context()) is None, "draining slots are not reused"
    manager.complete_store(output.keys_to_store, request)
    assert ledger.advance(0) == -2
    assert ledger.counts().draining == 0
    assert manager.stored_chunks == 0
    assert pool.get_num_free_blocks() == free + 2
    assert ledger.settled()


def test_blocks_with_a_load_in_flight_drain_and_keep_their_bytes_until_it_ends() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(1)
    ledger.advance(0)
    store(manager, 0, 2)
    request = context()
    spec = manager.prepare_load([key(0)], request)
    ledger.set_offload_target(0)
    ledger.advance(0)
    assert manager.lookup(key(0), context()).name == "HIT"
    assert manager.lookup(key(1), context()).name == "MISS", "idle chunks go at once"
    assert spec.block_ids.tolist() == [next(iter(LAYOUT.chunk_ids(next(iter(manager._draining)))))]
    manager.complete_load([key(0)], request)
    assert ledger.advance(0) == -1


def test_a_failed_store_returns_the_slot() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(1)
    ledger.advance(0)
    request = context()
    output = manager.prepare_store([key(0)], request)
    manager.complete_store(output.keys_to_store, request, success=False)
    assert manager.stored_chunks == 0
    assert store(manager, 0, PER_BLOCK) is not None


def test_a_pool_without_blocks_stores_nothing_and_does_not_fail() -> None:
    _, _, manager = make()
    assert manager.prepare_store([key(0)], context()) is None
    assert manager.lookup(key(0), context()).name == "MISS"
    manager.get_stats()


def test_reset_keeps_what_is_lent_and_forgets_what_is_stored() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(3)
    ledger.advance(0)
    store(manager, 0, 2 * PER_BLOCK)
    manager.reset_cache()
    assert (manager.lent_blocks, manager.stored_chunks) == (3, 0)
    assert store(manager, 0, 3 * PER_BLOCK) is not None
    sound(ledger)


def test_after_a_reset_a_slot_in_flight_is_free_only_when_its_own_flush_is_done() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(1)
    ledger.advance(0)
    store(manager, 0, 1, complete=False)
    manager.reset_cache()
    store(manager, 1, 1, complete=False)
    manager.reset_cache()
    assert (manager.settling_slots, manager.free_slots) == (2, PER_BLOCK - 2)
    assert store(manager, 2, PER_BLOCK) is None, "settling slots are not handed out"
    manager.settle(1)
    assert manager.free_slots == PER_BLOCK - 1
    manager.settle(2)
    assert store(manager, 2, PER_BLOCK) is not None
    sound(ledger)


def test_a_block_recalled_while_it_settles_drains_until_the_flush() -> None:
    ledger, pool, manager = make()
    ledger.set_offload_target(1)
    ledger.advance(0)
    store(manager, 0, 1, complete=False)
    manager.reset_cache()
    ledger.set_offload_target(0)
    assert ledger.advance(0) == 0
    assert manager.has_pending_work()
    manager.settle(manager.resets)
    assert ledger.advance(0) == -1
    assert not manager.has_pending_work()
    assert pool.get_num_free_blocks() == 100
    sound(ledger)


def test_partly_filled_blocks_are_filled_first_so_that_a_recall_finds_empty_ones() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(4)
    ledger.advance(0)
    store(manager, 0, PER_BLOCK + 1)
    ledger.set_offload_target(2)
    assert ledger.advance(0) == -2
    assert manager.stored_chunks == PER_BLOCK + 1
    store(manager, 100, PER_BLOCK - 1)
    assert manager.stored_chunks == 2 * PER_BLOCK
    sound(ledger)


def test_reserve_blocks_are_lent_to_nobody_and_come_before_the_offload_pool() -> None:
    ledger, pool, manager = make()
    ledger.set_offload_target(90)
    ledger.advance(0)
    assert ledger.set_reserve_target(30) == 30
    assert ledger.offload_target == 60, "the reserve takes its room from the offload target"
    ledger.advance(0)
    counts = ledger.counts()
    assert (counts.lent, counts.reserve, counts.hisparse_capacity) == (60, 30, 10)
    assert ledger.settled()
    assert ledger.set_reserve_target(1000) == 90
    ledger.set_reserve_target(0)
    assert ledger.advance(0) == -90, "the lent blocks and the reserve have come back"
    assert (pool.get_num_free_blocks(), manager.lent_blocks) == (100, 0)
    sound(ledger)


def test_reserve_is_pending_while_blocks_are_in_use() -> None:
    ledger, pool, _ = make()
    held = pool.get_new_blocks(95)
    ledger.set_reserve_target(20)
    ledger.advance(0)
    assert (ledger.counts().reserve, ledger.counts().pending) == (5, 15)
    pool.free_blocks(held)
    ledger.advance(0)
    assert ledger.counts().pending == 0
    sound(ledger)


def test_a_step_of_a_busy_engine_moves_a_bounded_number_of_blocks() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(50)
    assert [ledger.advance(0, most=20) for _ in range(4)] == [20, 20, 10, 0]
    store(manager, 0, 50 * PER_BLOCK)
    ledger.set_offload_target(0)
    assert [ledger.advance(0, most=30) for _ in range(3)] == [-30, -20, 0]
    sound(ledger)


def test_what_is_given_back_is_not_taken_again() -> None:
    ledger, pool, _ = make()
    ledger.set_reserve_target(20)
    ledger.set_offload_target(50)
    ledger.advance(0)
    assert ledger.give_back(55) == 55
    assert (ledger.offload_target, ledger.reserve_target) == (0, 15)
    assert ledger.advance(0) == 0
    assert pool.get_num_free_blocks() == 85
    sound(ledger)


def test_nothing_moves_within_a_scheduling_pass_or_while_frozen() -> None:
    ledger, _, manager = make()
    ledger.set_offload_target(50)
    with ledger.scheduling():
        assert ledger.advance(0) == 0
        assert ledger.give_back(1) == 0
    ledger.frozen = True
    assert ledger.advance(0) == 0
    ledger.frozen = False
    assert ledger.advance(0) == 50
    assert manager.lent_blocks == 50


def test_usage_is_of_what_is_hisparses_own() -> None:
    ledger, pool, _ = make()
    ledger.set_offload_target(40)
    ledger.set_reserve_target(10)
    ledger.advance(0)
    assert pool.get_usage() == 0
    pool.get_new_blocks(25)
    assert pool.get_usage() == 0.5


def test_a_budget_below_the_floor_is_refused() -> None:
    with pytest.raises(ValueError, match="host budget of 100 blocks is below the 200"):
        make(floor=200)


def test_a_negative_target_is_refused() -> None:
    ledger, _, _ = make()
    with pytest.raises(ValueError, match="offload target must not be negative, got -1"):
        ledger.set_offload_target(-1)
    with pytest.raises(ValueError, match="reserve target must not be negative, got -2"):
        ledger.set_reserve_target(-2)


def test_blocks_that_are_held_for_another_outlive_the_request_that_filled_them() -> None:
    ledger, pool, _ = make()
    filled = pool.get_new_blocks(3)
    pool.hold_for("ticket", [block.block_id for block in filled])
    pool.free_blocks(filled)
    ledger.set_offload_target(1000)
    ledger.advance(head_need_blocks=0)
    assert {block.ref_cnt for block in filled} == {1}
    assert pool.referenced_blocks - pool.held_blocks == 3
    sound(ledger)
    pool.let_go("ticket")
    assert pool.referenced_blocks == pool.held_blocks
    sound(ledger)
