"""How much of a call's prefix is held, by vLLM's own caches, at a bounded cost a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import make_offload_key

from hisparsed.engine.held_prefix import PASS_BLOCKS, HeldPrefix

BLOCK = 16
SOURCE, INDEXER = 0, 1


class Table:
    """vLLM's table of cached blocks, counting what it is asked."""

    def __init__(self) -> None:
        self.held: set[Any] = set()
        self.asked = 0

    def get_one_block(self, key: Any) -> CachedBlock | None:
        self.asked += 1
        return CachedBlock(self, key) if key in self.held else None


@dataclass
class CachedBlock:
    """A block knows its hash until it is evicted, as vLLM's does."""

    table: Table
    key: Any

    @property
    def block_hash(self) -> Any:
        return self.key if self.key in self.table.held else None


@dataclass
class Call:
    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int


class Caches:
    def __init__(self) -> None:
        self.source, self.indexer = Table(), Table()
        self.chunks: dict[Any, Any] = {}
        self.held = HeldPrefix(
            SimpleNamespace(cached_block_hash_to_block=self.source),
            SimpleNamespace(cached_block_hash_to_block=self.indexer),
            self.chunks,
            SOURCE,
            INDEXER,
            BLOCK,
        )

    def hold(self, call: Call, *, source: int, indexer: int = 0, chunks: int = 0) -> None:
        """The first blocks of each: on the host, on the GPU, and then in the offload pool."""
        hashes: Any = call.block_hashes
        self.source.held |= {make_block_hash_with_group_id(one, SOURCE) for one in hashes[:source]}
        self.indexer.held |= {
            make_block_hash_with_group_id(one, INDEXER) for one in hashes[:indexer]
        }
        for one in hashes[indexer : indexer + chunks]:
            self.chunks[make_offload_key(one, INDEXER)] = SimpleNamespace(is_ready=True)

    def tokens(self, call: Call, now_s: float = 0.0) -> int:
        self.held.look([call], now_s)
        return self.held.tokens(call.request_id)


@pytest.fixture
def caches() -> Caches:
    return Caches()


def call(name: str = "a", blocks: int = 10) -> Call:
    hashes = [f"{name}/{block}".encode() for block in range(blocks)]
    return Call(name, hashes, blocks * BLOCK + 5)


@pytest.mark.parametrize(
    ("source", "indexer", "chunks", "blocks"),
    [(10, 10, 0, 10), (10, 4, 3, 7), (3, 10, 0, 3), (0, 10, 0, 0), (10, 0, 10, 10), (10, 0, 0, 0)],
)
def test_held_is_what_both_pools_reach(
    caches: Caches, source: int, indexer: int, chunks: int, blocks: int
) -> None:
    caches.hold(call(), source=source, indexer=indexer, chunks=chunks)
    assert caches.tokens(call()) == blocks * BLOCK


def test_a_chunk_whose_store_has_not_ended_is_not_held(caches: Caches) -> None:
    caches.hold(call(), source=10, chunks=10)
    caches.chunks[make_offload_key(b"a/6", INDEXER)].is_ready = False
    assert caches.tokens(call()) == 6 * BLOCK


def test_the_last_token_is_always_computed(caches: Caches) -> None:
    whole = Call("a", call().block_hashes, 10 * BLOCK)
    caches.hold(whole, source=10, indexer=10)
    assert caches.tokens(whole) == 9 * BLOCK


def test_an_answer_is_kept_for_a_moment_and_then_asked_for_again(caches: Caches) -> None:
    assert caches.tokens(call(), now_s=1.0) == 0
    caches.hold(call(), source=10, indexer=10)
    assert caches.tokens(call(), now_s=1.2) == 0
    assert caches.tokens(call(), now_s=1.3) == 10 * BLOCK


def test_one_pass_asks_for_a_bounded_number_of_blocks_however_many_calls_wait(
    caches: Caches,
) -> None:
    waiting = [call(str(index), blocks=200) for index in range(300)]
    for one in waiting:
        caches.hold(one, source=200, indexer=200)
    caches.held.look(waiting, now_s=0.0)
    assert 0 < caches.source.asked <= PASS_BLOCKS + 200


def test_calls_that_one_pass_cannot_ask_for_have_their_turn(caches: Caches) -> None:
    waiting = [call(str(index), blocks=200) for index in range(100)]
    for one in waiting:
        caches.hold(one, source=200, indexer=200)
    for turn in range(20):
        caches.held.look(waiting, now_s=turn * 1.0)
    assert {caches.held.tokens(one.request_id) for one in waiting} == {200 * BLOCK}


def test_calls_at_the_head_of_the_queue_are_always_up_to_date(caches: Caches) -> None:
    waiting = [call(str(index), blocks=200) for index in range(100)]
    for one in waiting:
        caches.hold(one, source=200, indexer=200)
    for turn in range(10):
        caches.held.look(waiting, now_s=turn * 1.0)
    caches.source.held.clear()
    caches.held.look(waiting, now_s=10.0)
    assert [caches.held.tokens(one.request_id) for one in waiting[:4]] == [0] * 4


def test_what_is_still_held_is_not_asked_for_again(caches: Caches) -> None:
    one = call(blocks=10)
    caches.hold(one, source=10, indexer=10)
    assert caches.tokens(one, now_s=0.0) == 10 * BLOCK
    asked = caches.source.asked
    assert caches.tokens(one, now_s=1.0) == 10 * BLOCK
    assert caches.source.asked == asked


def test_what_was_lost_in_between_ends_the_prefix(caches: Caches) -> None:
    one = call(blocks=10)
    caches.hold(one, source=10, indexer=10)
    caches.tokens(one, now_s=0.0)
    caches.source.held.remove(make_block_hash_with_group_id(one.block_hashes[3], SOURCE))
    assert caches.tokens(one, now_s=1.0) == 3 * BLOCK
    caches.indexer.held.remove(make_block_hash_with_group_id(one.block_hashes[1], INDEXER))
    assert caches.tokens(one, now_s=2.0) == 1 * BLOCK
    caches.hold(one, source=10, indexer=10)
    assert caches.tokens(one, now_s=3.0) == 10 * BLOCK


def test_a_call_that_ended_is_forgotten(caches: Caches) -> None:
    caches.hold(call(), source=10, indexer=10)
    caches.tokens(call())
    caches.held.forget("a")
    assert caches.held.tokens("a") == 0
