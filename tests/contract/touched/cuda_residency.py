"""vLLM names behind hot buffers on a CUDA node: our resolver in the worker, leases, figures."""

from __future__ import annotations

from tests.contract.touch import How, Touch, Use, calls, overrides, reads, sets

_RUNTIME = "engine.cuda.residency.runtime"
_INSTALL = "engine.cuda.residency.runtime"
_EXTENSION = "engine.cuda.residency.vllm_hooks"
_CONNECTOR = "engine.cuda.residency.vllm_hooks"
_NO_START = "with `cuda.kernels: hisparsed` the engine does not start; vLLM's kernels are unharmed"
_NO_SHRINK = "with `cuda.kernels: hisparsed` the first hot buffer to shrink ends the engine"
_HISPARSE = "vllm.distributed.kv_transfer.kv_connector.v1.hisparse"

TOUCHED = (
    Touch(
        "vllm.v1.hisparse.runtime:HiSparseRuntime",
        by=(_RUNTIME,),
        ours=(f"{_RUNTIME}:ResolvedRuntime",),
        why="live runtimes are re-classed to ours, which finds rows by our resolver",
        breaks=_NO_START,
        uses=(
            *overrides(
                "_resolve_residency",
                "_swap_rows",
                "reset_hot_state",
                "invalidate_sorted_slots",
                "invalidate_written_slots",
            ),
            *reads(
                "request_state_indices",
                "hot_block_table",
                "index_group",
                "is_group_leader",
                "hot",
                "host_cache",
                "max_num_reqs",
            ),
            Use(How.READS, "max_union_rows", since="0.31", adapter="engine.compat.features"),
        ),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:HiSparseIndexGroup",
        by=(_INSTALL,),
        why="the layers that share a top-k, and what their attention reads",
        breaks=_NO_START,
        uses=reads("followers", "shared_topk"),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:_SharedTopKState",
        by=(_INSTALL,),
        why="our resolver writes into vLLM's own outputs, at addresses that graphs have recorded",
        breaks=_NO_START,
        uses=reads("physical_topk_indices", "valid_topk_counts", "swap_counts", "device_topk_rows"),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:PagedCacheView",
        by=(_INSTALL,),
        why="where a layer's rows lie among the GPU blocks",
        breaks=_NO_START,
        uses=reads("cache", "block_size", "attention_block_stride"),
    ),
    Touch(
        "vllm.v1.hisparse.runtime:HiSparseCacheHandle",
        by=(_RUNTIME, "engine.compat.adapters"),
        why="block tables of a layer: host pages, resident pages",
        breaks=_NO_START,
        uses=(
            *reads("runtime", "source_block_table", "block_table"),
            Use(How.READS, "residency", since="0.32", adapter="engine.compat.adapters"),
        ),
    ),
    Touch(
        f"{_HISPARSE}.connector:HiSparseConnector",
        by=(_CONNECTOR,),
        ours=(f"{_CONNECTOR}:HiSparseConnector",),
        why="tells workers of leases with each step's metadata, and installs our resolver",
        breaks=_NO_START,
        uses=(
            *overrides(
                "__init__",
                "build_connector_meta",
                "register_kv_caches",
                "start_load_kv",
                "shutdown",
            ),
            *reads("connector_scheduler", "connector_worker"),
            *calls("_get_connector_metadata"),
        ),
    ),
    Touch(
        f"{_HISPARSE}.connector:HiSparseConnectorMetadata",
        by=(_CONNECTOR,),
        ours=(f"{_CONNECTOR}:LeasedMetadata",),
        why="a step's metadata is re-classed to one that also tells of leases",
        breaks=_NO_START,
    ),
    Touch(
        f"{_HISPARSE}.connector:HiSparseConnectorScheduler",
        by=(_CONNECTOR,),
        why="leads to the coordinator, whose hot managers know every lease",
        breaks=_NO_START,
        uses=reads("coordinator"),
    ),
    Touch(
        f"{_HISPARSE}.worker:HiSparseConnectorWorker",
        by=(_CONNECTOR,),
        why="the cache handles of all layers, in the order of the hot groups; its views of the "
        "pool go before the pool is closed",
        breaks=_NO_START,
        uses=(*reads("cache_handles"), *sets("host_caches")),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        by=(_EXTENSION,),
        why="state rows of requests and their block tables, when hot buffers shrink",
        breaks=_NO_SHRINK,
        uses=reads("req_states", "block_tables", "kv_cache_config"),
    ),
    Touch(
        "vllm.v1.worker.gpu.states:RequestState",
        by=(_EXTENSION,),
        why="the state row of each request",
        breaks=_NO_SHRINK,
        uses=reads("req_id_to_index"),
    ),
    Touch(
        "vllm.v1.worker.gpu.block_table:BlockTables",
        by=(_EXTENSION,),
        why="a shrunk request's hot table ends earlier, so that blocks leased later follow",
        breaks=_NO_SHRINK,
        uses=reads("block_tables", "num_blocks"),
    ),
    Touch(
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor",
        by=(_EXTENSION,),
        why="the hot table on the GPU, by state row",
        breaks=_NO_SHRINK,
        uses=reads("gpu"),
    ),
    Touch(
        "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
        by=(_EXTENSION,),
        why="lengths of block tables, which vLLM copies to the GPU before each step",
        breaks=_NO_SHRINK,
        uses=reads("np"),
    ),
    Touch(
        "vllm.v1.executor.abstract:Executor",
        by=("engine.cuda.hot",),
        why="worker calls; figures without waiting for a step",
        breaks="with `cuda.kernels: hisparsed` rows are not counted and no hot buffer shrinks",
        uses=(
            *calls("collective_rpc", 1, "args"),
            *calls("collective_rpc", 1, "non_block"),
        ),
    ),
)
