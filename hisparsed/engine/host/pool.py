"""The HiSparse host pool, which also counts who holds its blocks.

A report must not walk the pool to find out how many idle blocks still hold a reusable prefix and
how many are in use. Blocks that the ledger has taken are neither: vLLM's usage gauge and its cache
reset must not count them as blocks of requests. Installed over the live pool by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

from hisparsed.engine.host.ghost_list import GhostList


def _idle_cached(blocks: Iterable[Any]) -> int:
    """Distinct blocks that are free but hold a prefix; a list may name a block twice."""
    return len(
        {
            block.block_id
            for block in blocks
            if block.ref_cnt == 0 and not block.is_null and block.block_hash is not None
        }
    )


def _unreferenced(blocks: Iterable[Any]) -> int:
    return len({block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null})


class CountingHostPool(SharedEventQueueBlockPool):  # type: ignore[misc]
    """``idle_cached_blocks``: free blocks with a hash. ``referenced_blocks``: blocks that are held,
    by the ledger too. ``held_blocks``: those that the ledger holds.
    All are kept at every transition."""

    def start_counting(self) -> None:
        self.idle_cached_blocks = self.walk_idle_cached_blocks()
        self.referenced_blocks = self.walk_referenced_blocks()
        self.held_blocks = 0
        self.holds: dict[str, list[Any]] = {}
        self.after_reset: Callable[[], None] = lambda: None
        self.ghost: GhostList | None = None
        self._resetting = False

    def walk_idle_cached_blocks(self) -> int:
        """The same figure by walking every block; for checks, not for reports."""
        return _idle_cached(self.blocks)

    def walk_referenced_blocks(self) -> int:
        """The same figure by walking every block; for checks, not for reports."""
        return sum(block.ref_cnt > 0 and not block.is_null for block in self.blocks)

    # --- the ledger's side ------------------------------------------------------------

    def take_idle(self, count: int) -> list[int]:
        """Take blocks out for the ledger: free ones first, then least recently used prefixes."""
        blocks = self.get_new_blocks(count)
        self.held_blocks += count
        return [int(block.block_id) for block in blocks]

    def give_back(self, block_ids: Sequence[int]) -> None:
        self.held_blocks -= len(block_ids)
        self.free_blocks([self.blocks[block_id] for block_id in block_ids])

    # --- others who keep blocks beyond the request that filled them --------------------

    def hold_for(self, holder: str, block_ids: Sequence[int]) -> None:
        """Keep blocks that are in use now, until ``let_go``. They stay HiSparse's."""
        self.holds[holder] = [self.blocks[block_id] for block_id in block_ids]
        self.touch(self.holds[holder])

    def let_go(self, holder: str) -> None:
        # Last first, so that a prefix loses its end before its beginning.
        self.free_blocks(reversed(self.holds.pop(holder)))

    # --- vLLM's side ------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        blocks: list[Any] = super().get_new_blocks(num_blocks)
        self.referenced_blocks += len(blocks)
        return blocks

    def touch(self, blocks: Sequence[Any]) -> None:
        self.idle_cached_blocks -= _idle_cached(blocks)
        self.referenced_blocks += _unreferenced(blocks)
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        self.idle_cached_blocks += _idle_cached(blocks)
        self.referenced_blocks -= _unreferenced(blocks)

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        was_idle = block.ref_cnt == 0 and not block.is_null
        block_hash = block.block_hash
        evicted = bool(super()._maybe_evict_cached_block(block))
        if evicted and was_idle:
            self.idle_cached_blocks -= 1
        if evicted and self.ghost is not None and not self._is_cached(block_hash):
            self.ghost.evicted(get_block_hash(block_hash))
        return evicted

    def _is_cached(self, block_hash: Any) -> bool:
        # Calls that compute the same prefix at once have a block each.
        return self.cached_block_hash_to_block.get_one_block(block_hash) is not None

    def _insert_block_hash(self, block_hash_with_group_id: Any, *args: Any, **kwargs: Any) -> None:
        super()._insert_block_hash(block_hash_with_group_id, *args, **kwargs)
        if self.ghost is not None:
            self.ghost.restored(get_block_hash(block_hash_with_group_id))

    def get_usage(self) -> float:
        """Share of HiSparse's own blocks that are in use, without the ledger's."""
        capacity = self.num_gpu_blocks - 1 - self.held_blocks
        return 1.0 - self.get_num_free_blocks() / capacity if capacity > 0 else 0.0

    def get_num_free_blocks(self) -> int:
        free = int(super().get_num_free_blocks())
        # vLLM resets only a pool whose blocks are all free. Those that the ledger holds belong to
        # no request and have no hash, so they count as free for this one check.
        return free + self.held_blocks if self._resetting else free

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; false while a request or a transfer holds a block."""
        self._resetting = True
        try:
            done = bool(super().reset_prefix_cache())
        finally:
            self._resetting = False
        if done:
            self.idle_cached_blocks = 0
            self.after_reset()
            if self.ghost is not None:
                self.ghost.clear()
        return done
