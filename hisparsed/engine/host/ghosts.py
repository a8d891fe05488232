"""Ghost lists of a running engine: vLLM's two pools report what they evict and restore.

Sizes them for the steps that policies take, asks vLLM's caches at each arrival, and fills the
report. ``ghost_list`` counts ghosts; the policy decides what they mean for the split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import make_offload_key

from hisparsed.engine.host.ghost_list import GhostList, GhostTokens, PrefixGhosts
from hisparsed.engine.host.offload import LentOffloadingManager
from hisparsed.engine.host.pool import CountingHostPool
from hisparsed.policy.signals import GhostPoint

STEP_SHARES = (0.005, 0.01, 0.02)
"""Steps of a policy, as shares of the budget, that have their own edges; values in between are
interpolated.
"""
MAX_ENTRIES = 4096
"""Blocks that one list follows: about 1.5 MiB of the engine process for both."""
_HEADROOM = 1.25
"""The actual sample of hashes may be larger than its rate."""


def step_edges(budget_blocks: int) -> tuple[int, ...]:
    """Host blocks of the steps in ``STEP_SHARES``, rising."""
    return tuple(sorted({max(1, int(share * budget_blocks)) for share in STEP_SHARES}))


def slack_edges(budget_blocks: int, chunks_per_block: int) -> tuple[int, ...]:
    """Steps, and as much as each takes from the offload pool's reach, whole and half."""
    edges = set(step_edges(budget_blocks))
    for step in step_edges(budget_blocks):
        deep = step * (1 + chunks_per_block)
        edges |= {deep // 2, deep}
    return tuple(sorted(edges))


def sample_rate(budget_blocks: int, chunks_per_block: int) -> float:
    """The largest rate at which the deepest edges of both lists fit ``MAX_ENTRIES``."""
    hisparse = slack_edges(budget_blocks, chunks_per_block)[-1]
    offload = step_edges(budget_blocks)[-1] * chunks_per_block
    return min(1.0, MAX_ENTRIES / (_HEADROOM * max(hisparse, offload)))


class PoolGhosts:
    """Hooks ghost lists into both pools of one engine. ``gpu_pool`` holds indexer pages too.

    ``source_group`` and ``indexer_group`` are vLLM's cache groups; ``rate`` replaces the
    sample rate that fits the budget.
    """

    def __init__(
        self,
        host_pool: CountingHostPool,
        offload: LentOffloadingManager,
        gpu_pool: Any,
        *,
        source_group: int,
        indexer_group: int,
        block_tokens: int,
        rate: float | None = None,
    ) -> None:
        budget, per_block = host_pool.num_gpu_blocks - 1, offload.layout.chunks_per_block
        rate = sample_rate(budget, per_block) if rate is None else rate
        hisparse_list = GhostList(MAX_ENTRIES, rate)
        offload_list = GhostList(MAX_ENTRIES, rate, per_block)
        self._ghosts = PrefixGhosts(
            hisparse_list,
            offload_list,
            block_tokens,
            slack_edges(budget, per_block),
            step_edges(budget),
        )
        host_pool.ghost, offload.ghost = hisparse_list, offload_list
        self._block_tokens = block_tokens
        self._source_held = _cached(host_pool, source_group)
        self._indexer_held = _cached(gpu_pool, indexer_group)
        self._offload = offload
        self._indexer_group = indexer_group

    def arrived(self, request: Any) -> None:
        """A call arrived; call this before any part of its prefix is restored."""
        # The last token is always computed, so a block that ends with it serves nothing.
        usable = (int(request.num_tokens) - 1) // self._block_tokens
        self._ghosts.looked_up(
            request.block_hashes[:usable], self._source_held, self._indexer_or_chunk
        )

    def hisparse_report(self) -> tuple[GhostPoint, ...]:
        return _report(self._ghosts.hisparse_points())

    def offload_report(self) -> tuple[GhostPoint, ...]:
        return _report(self._ghosts.offload_points())

    def _indexer_or_chunk(self, block_hash: bytes) -> bool:
        if self._indexer_held(block_hash):
            return True
        return self._offload.has_chunk(make_offload_key(block_hash, self._indexer_group))


def _cached(pool: Any, group: int) -> Callable[[bytes], bool]:
    def held(block_hash: Any) -> bool:
        key = make_block_hash_with_group_id(block_hash, group)
        # Looked up again each time: a reset of the cache replaces vLLM's table.
        return pool.cached_block_hash_to_block.get_one_block(key) is not None

    return held


def _report(points: Sequence[GhostTokens]) -> tuple[GhostPoint, ...]:
    return tuple(GhostPoint(one.extra_blocks, one.tokens) for one in points)
