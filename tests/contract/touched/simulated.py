"""vLLM names that only the simulated node touches."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, reads, sets

_LOOKUPS = ("engine.simulated.node",)
_WHY = "prefix look-ups of waiting calls are remembered between passes, to simulate faster"
_BREAKS = "policies cannot be simulated"

TOUCHED = (
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        by=_LOOKUPS,
        why=_WHY,
        breaks=_BREAKS,
        uses=(
            *reads("supports_fine_grained_hash_lookup"),
            *calls("find_longest_cache_hit", 7),
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator",
        by=_LOOKUPS,
        why=_WHY,
        breaks=_BREAKS,
        uses=sets("attention_groups"),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool",
        by=_LOOKUPS,
        why=_WHY,
        breaks=_BREAKS,
        uses=reads("hash_block_size"),
    ),
)
