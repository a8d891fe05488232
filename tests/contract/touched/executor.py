"""vLLM names behind the executors of the reference and simulated nodes."""

from __future__ import annotations

from tests.contract.touch import Touch, calls, fields, members, overrides, reads, sets

_IN_PROCESS = ("engine.in_process_executor",)
_NODES = ("engine.reference.executor", "engine.simulated.executor")
_EXECUTORS = (*_IN_PROCESS, *_NODES)
_BREAKS = "the reference and simulated nodes do not start"

TOUCHED = (
    Touch(
        "vllm.v1.executor.abstract:Executor",
        by=_EXECUTORS,
        ours=(
            "engine.in_process_executor:InProcessExecutor",
            "engine.reference.executor:ReferenceExecutor",
            "engine.simulated.executor:SimulatedExecutor",
        ),
        why="what stands where the GPU worker is, on nodes without one",
        breaks=_BREAKS,
        uses=(
            *overrides(
                "_init_executor",
                "get_kv_cache_specs",
                "get_supported_kv_cache_layouts",
                "set_kv_cache_layout",
                "determine_available_memory",
                "initialize_from_config",
                "compile_or_warm_up_model",
                "get_kv_connector_handshake_metadata",
                "supported_tasks",
                "execute_model",
                "sample_tokens",
                "take_draft_token_ids",
                "collective_rpc",
                "check_health",
                "shutdown",
                "supports_async_scheduling",
            ),
            *reads("vllm_config", "model_config", "cache_config", "scheduler_config"),
        ),
    ),
    Touch(
        "vllm.v1.hisparse.layout:get_hisparse_kv_cache_groups",
        by=_IN_PROCESS,
        why="the resident and hot pages that vLLM plans beside a model's own",
        breaks=_BREAKS,
        uses=calls("", 2),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:MLAAttentionSpec",
        by=_IN_PROCESS,
        why="says what a layer's KV looks like",
        breaks=_BREAKS,
        uses=calls(
            "",
            0,
            "block_size",
            "num_kv_heads",
            "head_size",
            "dtype",
            "cache_role",
            "is_index_group_leader",
        ),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:SparseCacheRole",
        by=_IN_PROCESS,
        why="tells latent rows from indexer rows",
        breaks=_BREAKS,
        uses=members("SPARSE", "INDEXER"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:HiSparseHotSpec",
        by=("engine.reference.executor",),
        why="blocks of the largest hot lease",
        breaks="the reference node does not start",
        uses=reads("blocks_per_request"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        by=("engine.reference.store",),
        why="where each layer's pages lie",
        breaks="the reference node does not start",
        uses=reads("host_resident", "offset", "layer_stride", "layers", "block_stride", "size"),
    ),
    Touch(
        "vllm.v1.outputs:ModelRunnerOutput",
        by=_EXECUTORS,
        why="the tokens of a step",
        breaks="the reference and simulated nodes do not run",
        uses=(
            *calls("", 0, "req_ids", "req_id_to_index", "sampled_token_ids", "kv_connector_output"),
            *calls("with_kv_conn_output_only", 1),
        ),
    ),
    Touch(
        "vllm.v1.outputs:DraftTokenIds",
        by=_NODES,
        why="drafts for the next step",
        breaks="speculation does not run on the reference and simulated nodes",
        uses=calls("", 2),
    ),
    Touch(
        "vllm.v1.outputs:KVConnectorOutput",
        by=("engine.reference.connectors", "engine.simulated.connectors"),
        why="what the connectors have done in a step",
        breaks="the reference and simulated nodes do not run",
        uses=calls("", 0, "finished_recving", "failed_recving", "kv_connector_worker_meta"),
    ),
    Touch(
        "vllm.config:VllmConfig",
        by=(
            "engine.reference.vllm_config",
            "engine.simulated.vllm_config",
            "engine.in_process_executor",
            "engine.reference.executor",
            "engine.control",
        ),
        ours=("engine.reference.vllm_config:ReferenceVllmConfig",),
        why="its check of the platform must not see HiSparse where there is no CUDA",
        breaks=_BREAKS,
        uses=(
            *overrides("__post_init__"),
            *reads(
                "model_config",
                "cache_config",
                "parallel_config",
                "scheduler_config",
                "lora_config",
                "additional_config",
                "num_speculative_tokens",
            ),
            *fields("attention_config"),
            *sets("kv_transfer_config"),
        ),
    ),
    Touch(
        "vllm.config:HiSparseConfig",
        by=("engine.reference.vllm_config", "engine.simulated.vllm_config"),
        why="the largest hot buffer, and when rows reach the host",
        breaks=_BREAKS,
        uses=calls("", 0, "device_buffer_size", "eager_host_mirror"),
    ),
    Touch(
        "vllm.config:AttentionConfig",
        by=("engine.reference.vllm_config", "engine.reference.connectors"),
        why="where HiSparse is switched on",
        breaks=_BREAKS,
        uses=fields("hisparse_config"),
    ),
    Touch(
        "vllm.config:KVTransferConfig",
        by=(
            "engine.reference.vllm_config",
            "engine.simulated.vllm_config",
            "engine.reference.handoff.connector",
        ),
        why="names the connectors",
        breaks="the engine does not start",
        uses=(
            *calls("", 0, "kv_connector", "kv_role", "kv_connector_extra_config"),
            *fields("kv_load_failure_policy", "kv_connector_module_path"),
            *reads("is_kv_producer", "is_kv_consumer", "engine_id"),
        ),
    ),
    Touch(
        "vllm.config:ParallelConfig",
        by=("engine.reference.vllm_config",),
        why="refuses what HiSparse cannot run with",
        breaks=_BREAKS,
        uses=reads(
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "tensor_parallel_size",
            "data_parallel_size",
        ),
    ),
    Touch(
        "vllm.config:SchedulerConfig",
        by=("engine.reference.vllm_config", "engine.reference.executor"),
        why="refuses what HiSparse cannot run with",
        breaks=_BREAKS,
        uses=reads("scheduler_reserve_full_isl", "max_num_seqs"),
    ),
    Touch(
        "vllm.config:ModelConfig",
        by=(
            "engine.control",
            "engine.openai_app",
            "engine.limited_llm",
            "engine.reference.vllm_config",
        ),
        why="the model's top-k, length and name",
        breaks="the engine does not start",
        uses=reads("hf_config", "max_model_len", "model"),
    ),
)
