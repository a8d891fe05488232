"""How much of a waiting call's prefix both pools still hold, from vLLM's own caches.

A prefix counts only where the HiSparse pool and the indexer KV (on the GPU or offloaded) both
reach. Read-only: it does not change the recency of blocks. A look-up costs one probe per block on
the engine thread, so one pass makes a bounded number of them. An earlier result is checked instead
of repeating its look-up: the same answer in a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import make_offload_key

_hash_of = attrgetter("block_hash")


class RememberedPrefix:
    """``hashes`` of the call, a list that only grows; ``group`` is the cache group looked in."""

    def __init__(self, hashes: Sequence[Any], group: int) -> None:
        self.hashes = hashes
        self._group = group
        self._keys: list[Any] = []
        self._blocks: list[Any] = []

    def walk(self, table: Any, most: int) -> list[Any]:
        """vLLM's blocks of the longest cached prefix of at most ``most`` blocks."""
        keys, blocks = self._keys, self._blocks
        now = list(map(_hash_of, blocks))
        if now != keys:
            kept = next(index for index, key in enumerate(keys) if now[index] != key)
            del keys[kept:], blocks[kept:]
        for block_hash in self.hashes[len(blocks) : most]:
            key = make_block_hash_with_group_id(block_hash, self._group)
            block = table.get_one_block(key)
            if block is None:
                break
            keys.append(key)
            blocks.append(block)
        return blocks[:most]


PASS_BLOCKS = 2_048
"""Blocks that one pass probes, plus at most one call: a few milliseconds."""
_HEADS = 4
"""Calls that start soon are looked up before those whose last look-up is oldest."""


class HeldPrefix:
    """Held tokens of waiting calls; ``look`` reads the caches, ``tokens`` returns the results.

    ``source_pool`` and ``indexer_pool`` are vLLM's block pools of the two cache groups,
    ``chunks`` the offload pool's cache policy.
    """

    def __init__(
        self,
        source_pool: Any,
        indexer_pool: Any,
        chunks: Any,
        source_group: int,
        indexer_group: int,
        block_tokens: int,
        fresh_for_s: float = 0.25,
    ) -> None:
        self._source_pool = source_pool
        self._indexer_pool = indexer_pool
        self._chunks = chunks
        self._source_group = source_group
        self._indexer_group = indexer_group
        self._block_tokens = block_tokens
        self._fresh_for_s = fresh_for_s
        self._found: dict[str, tuple[float, int]] = {}
        self._known: dict[str, _Known] = {}

    def look(self, requests: Sequence[Any], now_s: float) -> None:
        """Update the results for ``requests``, which are in starting order.

        If one pass cannot look up all calls, the others take turns, those without a result first.
        """
        stale = [
            request
            for request in requests
            if now_s - self._looked_at_s(request.request_id) >= self._fresh_for_s
        ]
        heads, others = stale[:_HEADS], stale[_HEADS:]
        others.sort(key=lambda request: self._looked_at_s(request.request_id))
        left = PASS_BLOCKS
        for request in (*heads, *others):
            if left <= 0:
                return
            held, probed = self._held_blocks(request)
            left -= probed + 1
            self._found[request.request_id] = (now_s, held * self._block_tokens)

    def tokens(self, request_id: str) -> int:
        """Tokens of the prefix that need no recomputation, as of the last look-up; 0 for a call
        without one."""
        return self._found.get(request_id, (0.0, 0))[1]

    def forget(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._known.pop(request_id, None)

    def _looked_at_s(self, request_id: str) -> float:
        return self._found.get(request_id, (-math.inf, 0))[0]

    def _held_blocks(self, request: Any) -> tuple[int, int]:
        """Blocks held in both pools, and blocks of indexer KV that were probed."""
        # vLLM always computes the last token.
        usable = (int(request.num_tokens) - 1) // self._block_tokens
        hashes = request.block_hashes
        usable = min(usable, len(hashes))
        known = self._known.get(request.request_id)
        if known is None or known.source.hashes is not hashes:
            known = self._known[request.request_id] = _Known(
                RememberedPrefix(hashes, self._source_group),
                RememberedPrefix(hashes, self._indexer_group),
            )
        # Tables are fetched again each time: a reset of the cache replaces vLLM's.
        indexed = len(known.indexer.walk(self._indexer_pool.cached_block_hash_to_block, usable))
        while indexed < usable:
            # As vLLM: the offload pool continues where the GPU ends.
            chunk = self._chunks.get(known.chunk_key(indexed, self._indexer_group))
            if chunk is None or not chunk.is_ready:
                break
            indexed += 1
        held = known.source.walk(self._source_pool.cached_block_hash_to_block, indexed)
        return len(held), indexed


@dataclass
class _Known:
    """The result of the look-up for one call, and the names of its chunks."""

    source: RememberedPrefix
    indexer: RememberedPrefix
    chunk_keys: list[Any] = field(default_factory=list)

    def chunk_key(self, index: int, group: int) -> Any:
        while len(self.chunk_keys) <= index:
            block_hash = self.source.hashes[len(self.chunk_keys)]
            self.chunk_keys.append(make_offload_key(block_hash, group))
        return self.chunk_keys[index]
