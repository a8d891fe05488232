"""vLLM names behind the offload pool that lives on lent host blocks."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, implements, overrides, reads, sets

TOUCHED = (
    Touch(
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",
        by=("engine.host.offload", "engine.control"),
        ours=("engine.host.offload:LentOffloadingManager",),
        why="the stock manager is re-classed so that chunks live in lent host blocks",
        breaks="the offload pool has no memory or hands out a slot twice",
        uses=(
            *overrides(
                "_allocate_chunks",
                "_free_chunk",
                "lookup",
                "prepare_load",
                "complete_load",
                "complete_store",
                "reset_cache",
                "has_pending_work",
            ),
            *reads(
                "_policy",
                "events",
                "medium",
                "_num_write_pending_chunks",
            ),
            *sets("_num_chunks", "_num_allocated_chunks", "_num_evictable_cache_chunks"),
            *sets("_free_list"),
        ),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.policies.base:CachePolicy",
        by=("engine.host.offload", "engine.held_prefix"),
        why="the chunks that the pool holds, looked at without counting as a use",
        breaks="recalls find no chunk to evict; admission does not know what is offloaded",
        uses=(*calls("get", 1), *calls("remove", 1), *sets("cache_capacity")),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.policies.base:ChunkStatus",
        by=("engine.host.offload", "engine.held_prefix"),
        why="a chunk's slot, and whether a transfer uses it",
        breaks="a chunk with a transfer in flight is taken for an idle one",
        uses=(*calls("", 1), *reads("chunk_id", "ref_cnt", "is_ready")),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec",
        by=("engine.host.offload", "engine.simulated.connectors"),
        ours=(
            "engine.host.offload:LentOffloadingSpec",
            "engine.reference.connectors:ReferenceOffloadingSpec",
            "engine.simulated.connectors:SimulatedOffloadingSpec",
            "engine.simulated.connectors:StandardOffloadingSpec",
        ),
        why="builds vLLM's manager, whose constructor differs between versions",
        breaks="the engine does not start",
        uses=(
            *overrides("get_manager", "get_worker"),
            *reads("_manager", "blocks_per_chunk"),
        ),
    ),
    Touch(
        "vllm.v1.kv_offload.base:OffloadingWorker",
        by=("engine.reference.connectors", "engine.simulated.connectors"),
        ours=(
            "engine.reference.connectors:LentChunkWorker",
            "engine.simulated.connectors:SimulatedChunkWorker",
        ),
        why="copies chunks between the GPU and lent host blocks",
        breaks="nothing is offloaded or loaded",
        uses=implements("submit_store", "submit_load", "get_finished", "wait"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:TransferResult",
        by=("engine.reference.connectors", "engine.simulated.connectors"),
        why="what a finished copy is reported as",
        breaks="copies never end for vLLM",
        uses=calls("", 2, "transfer_size", "transfer_time"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:OffloadingEvent",
        by=("engine.host.offload",),
        why="evictions by a recall are told like vLLM's own",
        breaks="KV events miss what a recall has evicted",
        uses=calls("", 0, "keys", "medium", "removed"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:OffloadingManager",
        by=("engine.host.offload",),
        why="the type that a spec's manager has",
        breaks="the engine does not start",
    ),
    Touch(
        "vllm.v1.kv_offload.base:LoadStoreSpec",
        by=("engine.host.offload",),
        why="the chunks of a load, for their recency",
        breaks="the engine does not start",
    ),
    Touch(
        "vllm.v1.kv_offload.base:BlockIDsLoadStoreSpec",
        by=("engine.host.offload", "engine.reference.connectors", "engine.simulated.connectors"),
        why="the chunks and blocks of a copy",
        breaks="nothing is offloaded or loaded",
        uses=reads("block_ids"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:LookupResult",
        by=("engine.host.offload",),
        why="the answer to vLLM's look-up, passed through",
        breaks="the engine does not start",
    ),
    Touch(
        "vllm.v1.kv_offload.base:ReqContext",
        by=("engine.host.offload",),
        why="whose look-up it is, passed through",
        breaks="the engine does not start",
    ),
    Touch(
        "vllm.v1.kv_offload.base:CanonicalKVCaches",
        by=("engine.host.offload", "engine.reference.connectors", "engine.simulated.connectors"),
        why="what vLLM gives a spec's worker",
        breaks="the engine does not start",
    ),
    Touch(
        "vllm.v1.kv_offload.base",
        by=("engine.host.offload",),
        why="the key of a chunk",
        breaks="the engine does not start",
        uses=reads("OffloadKey"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:make_offload_key",
        by=("engine.host.ghosts", "engine.held_prefix"),
        why="the key of a prefix block's chunk",
        breaks="ghost lists and held-prefix admission see no offloaded chunk",
        uses=calls("", 2),
    ),
    Touch(
        "vllm.v1.kv_offload.base:get_offload_block_hash",
        by=("engine.host.offload",),
        why="the prefix hash of an evicted chunk, for the ghost list",
        breaks="the marginal value of the offload pool is not measured",
        uses=calls("", 1),
    ),
    Touch(
        "vllm.v1.kv_offload.factory:OffloadingSpecFactory",
        by=("engine.reference.connectors", "engine.simulated.connectors"),
        why="makes the spec that the configuration names",
        breaks="the reference and simulated nodes do not start",
        uses=calls("create_spec", 1),
    ),
)
