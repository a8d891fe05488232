"""How much of a waiting call's prefix both pools still hold, asked of vLLM's own caches.

A prefix counts only where the HiSparse pool and the indexer KV (on the GPU or offloaded)
both reach. Read-only: recency of what is looked at does not change.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import make_offload_key


class HeldPrefix:
    """Held tokens of a request, cached for a short while: a look-up costs a probe a block."""

    def __init__(
        self,
        coordinator: Any,
        offload_policy: Any,
        source_group: int,
        indexer_group: int,
        block_tokens: int,
        fresh_for_s: float = 0.25,
    ) -> None:
        self._coordinator = coordinator
        self._offload_policy = offload_policy
        self._source_group = source_group
        self._indexer_group = indexer_group
        self._block_tokens = block_tokens
        self._fresh_for_s = fresh_for_s
        self._cached: dict[str, tuple[float, int]] = {}

    def tokens(self, request: Any, now_s: float) -> int:
        """Tokens of the prefix that would not have to be recomputed now."""
        known = self._cached.get(request.request_id)
        if known is not None and now_s - known[0] < self._fresh_for_s:
            return known[1]
        _, hits = self._coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        held = int(hits[self._indexer_group])
        source = int(hits[self._source_group])
        while held < source:
            block_hash = request.block_hashes[held // self._block_tokens]
            chunk = self._offload_policy.get(make_offload_key(block_hash, self._indexer_group))
            if chunk is None or not chunk.is_ready:
                break
            held += self._block_tokens
        held = min(held, source)
        self._cached[request.request_id] = (now_s, held)
        return held

    def forget(self, request_id: str) -> None:
        self._cached.pop(request_id, None)
