"""vLLM names that the launch and the telemetry of the CUDA node touch."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, fields, members, reads, sets, texts

_LAUNCH = ("engine.cuda.launch",)
_NO_START = "the CUDA node does not start"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_HISPARSE = "vllm.distributed.kv_transfer.kv_connector.v1.hisparse"

TOUCHED = (
    Touch(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        by=_LAUNCH,
        why="the engine's configuration, with what operators pass through",
        breaks=_NO_START,
        uses=(
            *fields(
                "model",
                "served_model_name",
                "tensor_parallel_size",
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
                "gpu_memory_utilization",
                "kv_cache_dtype",
                "block_size",
                "enable_prefix_caching",
                "scheduler_reserve_full_isl",
                "disable_hybrid_kv_cache_manager",
                "distributed_executor_backend",
                "scheduler_cls",
                "kv_transfer_config",
                "attention_config",
                "speculative_config",
                "worker_extension_cls",
            ),
            *calls("create_engine_config", 1),
            *calls("create_model_config"),
        ),
    ),
    Touch(
        "vllm.usage.usage_lib:UsageContext",
        by=_LAUNCH,
        why="what is left out is as under `vllm serve`",
        breaks=_NO_START,
        uses=members("OPENAI_API_SERVER"),
    ),
    Touch(
        "vllm.config:VllmConfig",
        by=_LAUNCH,
        why="hot rows and scheduler class follow from what vLLM has read and chosen",
        breaks=_NO_START,
        uses=reads("model_config", "attention_config", "scheduler_config", "additional_config"),
    ),
    Touch(
        "vllm.config:ModelConfig",
        by=_LAUNCH,
        why="top-k and layers of a model that vLLM had to look up",
        breaks=_NO_START,
        uses=reads("hf_config"),
    ),
    Touch(
        "vllm.config:AttentionConfig",
        by=_LAUNCH,
        why="where HiSparse's own options are",
        breaks=_NO_START,
        uses=fields("hisparse_config"),
    ),
    Touch(
        "vllm.config:HiSparseConfig",
        by=_LAUNCH,
        why="rows of the largest hot buffer, and when rows reach the host",
        breaks=_NO_START,
        uses=(*fields("eager_host_mirror"), *sets("device_buffer_size")),
    ),
    Touch(
        "vllm.config:SchedulerConfig",
        by=_LAUNCH,
        why="the scheduler class is the synchronous one where vLLM schedules so",
        breaks=_NO_START,
        uses=(*reads("async_scheduling", "max_num_seqs"), *sets("scheduler_cls")),
    ),
    Touch(
        "vllm.config.kv_transfer",
        by=_LAUNCH,
        why="the key that the whole host budget is given with",
        breaks=_NO_START,
        uses=texts("host_pool_gib", "HiSparseConnector", "MultiConnector"),
    ),
    Touch(
        "vllm.config:KVTransferConfig",
        by=_LAUNCH,
        why="names the connectors, and lets a failed load be recomputed",
        breaks=_NO_START,
        uses=fields(
            "kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"
        ),
    ),
    Touch(
        "vllm.envs",
        by=("engine.cuda.checks",),
        why="HiSparse runs in the second model runner only; where NIXL listens",
        breaks="a start that must fail does so minutes later; two nodes want one port",
        uses=texts(
            "VLLM_USE_V2_MODEL_RUNNER",
            "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "VLLM_NIXL_SIDE_CHANNEL_PORT",
        ),
    ),
    Touch(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        by=_LAUNCH,
        why="the connector by which a decode node fetches prefixes",
        breaks="a decode node does not start",
        uses=texts("NixlConnector"),
    ),
    Touch(
        f"{_NIXL}.metadata",
        by=("engine.remote_prefix",),
        why="the keys of a call that NIXL acts on; a wrong form would end its workers",
        breaks="a client's mistake ends the engine of a decode node",
        uses=texts(
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "remote_num_tokens",
            "tp_size",
            "dcp_size",
            "pp_size",
        ),
    ),
    Touch(
        f"{_NIXL}.base_scheduler",
        by=("engine.remote_prefix",),
        why="which calls fetch, and which are kept for others",
        breaks="prefixes are not fetched, or from whom a client likes",
        uses=texts("do_remote_decode", "do_remote_prefill"),
    ),
    Touch(
        "vllm.v1.metrics.stats:SchedulerStats",
        by=("engine.telemetry",),
        why="vLLM's own counters of hot buffers come with it",
        breaks="vLLM's samples of hot buffers are missing from the status",
        uses=reads("kv_connector_stats"),
    ),
    Touch(
        f"{_HISPARSE}.stats",
        by=("engine.telemetry",),
        why="the keys of vLLM's counters of hot buffers",
        breaks="vLLM's samples of hot buffers are missing from the status",
        uses=texts("cache_hits", "cache_misses", "host_to_device_bytes"),
    ),
    Touch(
        "vllm.config:ParallelConfig",
        by=("engine.telemetry",),
        why="every rank counts the same rows",
        breaks="vLLM's samples of hot buffers are missing from the status",
        uses=reads("world_size"),
    ),
)
