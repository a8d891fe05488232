"""vLLM names that the offload pool's workers on the CUDA node touch, and the fence of stores."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, implements, only, overrides, reads, sets, texts

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"
_POOL = "engine.cuda.offload"
_NO_START = "the engine of the CUDA node does not start"

TOUCHED = (
    Touch(
        f"{_STATE}:get_kv_transfer_group",
        by=(_POOL,),
        why="the way from a GPU worker's process to HiSparse's pinned pool",
        breaks=_NO_START,
        uses=calls(),
    ),
    Touch(
        f"{_STATE}:has_kv_transfer_group",
        by=(_POOL,),
        why="says why there is no pool where a process has no connector",
        breaks=_NO_START,
        uses=calls(),
    ),
    Touch(
        f"{_V1}.hisparse.connector:HiSparseConnector",
        by=(_POOL,),
        why="the way from a GPU worker's process to HiSparse's pinned pool",
        breaks=_NO_START,
        uses=reads("connector_worker"),
    ),
    Touch(
        f"{_V1}.hisparse.worker:HiSparseConnectorWorker",
        by=(_POOL, "engine.compat.adapters"),
        why="where the pinned pool lies, who writes it, and on which stream",
        breaks="the engine of the CUDA node does not start; or, if the order of HiSparse's writes "
        "changed, a late mirrored row lands in a stored chunk",
        uses=(
            *reads(
                "host_caches",
                "kernel_block_size",
                "host_num_blocks",
                "shared_host_region",
                "pinned_host_pools",
                "is_host_writer",
                "dma_stream",
                "kv_cache_config",
            ),
            *only(calls("_finish_previous_step"), "engine.compat.adapters", since="0.31"),
        ),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion",
        by=(_POOL,),
        why="where each registration of a pool that all ranks map begins",
        breaks=_NO_START,
        uses=reads("pinned_addresses", "base_tensor"),
    ),
    Touch(
        "vllm._custom_ops:swap_blocks_batch",
        by=("engine.cuda.copies",),
        why="copies between GPU and host, many in one driver call",
        breaks="the first store ends the engine",
        uses=calls("", 3, "is_src_access_order_any"),
    ),
    Touch(
        "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec",
        by=("engine.cuda.offload", "engine.host.offload"),
        ours=("engine.cuda.offload:CudaOffloadingSpec",),
        why="the spec of the CUDA node; its worker decides which rank stores",
        breaks=_NO_START,
        uses=(
            *overrides("__init__", "get_manager", "get_worker"),
            *reads("config", "extra_config"),
            *sets("replicated_layout"),
        ),
    ),
    Touch(
        "vllm.v1.kv_offload.config:OffloadingConfig",
        by=("engine.cuda.offload",),
        why="the number of ranks, for one line in the log",
        breaks=_NO_START,
        uses=reads("parallel"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:OffloadingWorker",
        by=("engine.cuda.offload",),
        ours=("engine.cuda.offload:CudaChunkWorker",),
        why="stores and loads of one rank",
        breaks="nothing is offloaded or loaded",
        uses=implements("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:TransferResult",
        by=("engine.cuda.offload",),
        why="what a finished copy is reported as",
        breaks="copies never end for vLLM",
        uses=calls("", 2, "transfer_size", "transfer_time"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:BlockIDsLoadStoreSpec",
        by=("engine.cuda.offload",),
        why="the chunks and blocks of a copy",
        breaks="nothing is offloaded or loaded",
        uses=reads("block_ids"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:CanonicalKVCaches",
        by=("engine.cuda.offload",),
        why="where the indexer's pages lie on the GPU",
        breaks=_NO_START,
        uses=reads("tensors", "group_data_refs"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:CanonicalKVCacheTensor",
        by=("engine.cuda.offload",),
        why="address and stride of one indexer layer",
        breaks=_NO_START,
        uses=reads("tensor"),
    ),
    Touch(
        "vllm.v1.kv_offload.base:CanonicalKVCacheRef",
        by=("engine.cuda.offload",),
        why="bytes of one indexer page",
        breaks=_NO_START,
        uses=reads("tensor_idx", "page_size_bytes"),
    ),
    Touch(
        f"{_V1}.offloading.config",
        by=("engine.cuda.offload",),
        why="a layout option of vLLM's that lent blocks cannot have",
        breaks="the option is not refused any more",
        uses=texts("canonical_layout"),
    ),
    Touch(
        f"{_V1}.offloading.scheduler:OffloadingConnectorScheduler",
        by=("engine.host.offload",),
        ours=("engine.host.offload:FencedOffloadingScheduler",),
        why="stores are flushed when any group of the GPU pool takes their blocks",
        breaks="a chunk can be stored from a block that another request has written already",
        uses=(
            *overrides("build_connector_meta"),
            *reads("_current_batch_allocated_block_ids"),
        ),
    ),
    Touch(
        f"{_V1}.offloading.scheduler:OffloadingConnectorScheduler",
        by=("engine.host.offload",),
        ours=("engine.host.offload:FencedOffloadingScheduler",),
        why="a prefix is looked up in one call, and not in one for each of its chunks",
        breaks="calls that wait at the head of the queue cost the engine core milliseconds a step",
        uses=(
            *overrides("_maximal_prefix_lookup"),
            *reads("_events_tracker"),
        ),
    ),
    Touch(
        f"{_V1}.offloading.scheduler:OffloadingConnectorScheduler",
        by=("engine.host.offload", "engine.compat.adapters"),
        ours=("engine.host.offload:FencedOffloadingScheduler",),
        why="what a look-up found is retained until its load begins",
        breaks="a chunk is gone when its load begins, and the engine ends",
        uses=(
            *overrides("get_num_new_matched_tokens", "update_state_after_alloc"),
            *overrides("request_finished", "reset_cache"),
            *reads("_req_status"),
            *only(calls("_release_step"), "engine.compat.adapters", since="0.33"),
        ),
    ),
)
