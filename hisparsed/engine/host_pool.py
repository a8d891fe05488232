"""The HiSparse host pool, counting idle blocks that still hold a reusable prefix.

vLLM's pool knows how many blocks are free, not how many of those are cached; a report must
not walk the pool to find out. Installed over the live pool by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool


def _idle_cached(blocks: Iterable[Any]) -> int:
    """Distinct blocks that are free but hold a prefix; a list may name a block twice."""
    return len(
        {
            block.block_id
            for block in blocks
            if block.ref_cnt == 0 and not block.is_null and block.block_hash is not None
        }
    )


class CountingHostPool(SharedEventQueueBlockPool):  # type: ignore[misc]
    """``idle_cached_blocks``: free blocks with a hash, kept at every transition."""

    def start_counting(self) -> None:
        self.idle_cached_blocks = self.walk_idle_cached_blocks()

    def walk_idle_cached_blocks(self) -> int:
        """The same figure by walking every block; for checks, not for reports."""
        return _idle_cached(self.blocks)

    def touch(self, blocks: Sequence[Any]) -> None:
        self.idle_cached_blocks -= _idle_cached(blocks)
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        self.idle_cached_blocks += _idle_cached(blocks)

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        was_idle = block.ref_cnt == 0 and not block.is_null
        evicted = bool(super()._maybe_evict_cached_block(block))
        if evicted and was_idle:
            self.idle_cached_blocks -= 1
        return evicted

    def reset_prefix_cache(self) -> bool:
        done = bool(super().reset_prefix_cache())
        if done:
            self.idle_cached_blocks = 0
        return done
