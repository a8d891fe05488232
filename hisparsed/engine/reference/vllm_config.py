"""vLLM's configuration for the reference node: HiSparse on a CPU, without patching vLLM.

vLLM refuses HiSparse off CUDA when a ``VllmConfig`` is initialised, and the engine-core
child initialises it again. The subclass here hides the two settings from that check alone;
the checks that matter without CUDA are made by ``require_supported``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.config import HiSparseConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from hisparsed.engine.reference.drafts import LONGEST_MATCH
from hisparsed.engine.reference.handoff.worker import HandoffOptions
from hisparsed.engine.scratch import scratch_block_count

EXECUTOR = "hisparsed.engine.reference.executor.ReferenceExecutor"
SCHEDULER = "hisparsed.engine.scheduler.HisparsedScheduler"


class ReferenceVllmConfig(VllmConfig):  # type: ignore[misc]
    """A ``VllmConfig`` whose platform check does not see HiSparse. Pickles by reference."""

    kv_transfer_config: Any

    def __post_init__(self) -> None:
        hisparse = self.attention_config.hisparse_config
        transfer = self.kv_transfer_config
        self.attention_config.hisparse_config = None
        self.kv_transfer_config = None
        try:
            super().__post_init__()
        finally:
            self.attention_config.hisparse_config = hisparse
            self.kv_transfer_config = transfer


@dataclass(frozen=True)
class ReferenceOptions:
    """What the node configuration decides; bytes, blocks and rows as named."""

    model_folder: Path
    host_budget_bytes: int
    gpu_blocks: int
    max_lease_rows: int
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ack_lag_steps: int
    threads: int
    served_model_name: str
    engine_args: dict[str, Any]
    speculative_tokens: int = 0
    """Drafts verified with each token; 0 decodes one by one."""
    eager_host_mirror: bool = True
    """Decode rows reach the host as they are written, not when their page is full."""
    bookkeeping: str = "hisparsed"
    """``hisparsed`` or ``vllm``: who keeps HiSparse's pages."""
    handoff: HandoffOptions | None = None
    """The node's part in handing prefixes over; without it each call stays on one node."""


def require_supported(config: VllmConfig) -> None:
    """Refuse what HiSparse cannot run with, as vLLM would on CUDA; raises ``ValueError``."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("engine_args.pipeline_parallel_size: HiSparse needs 1")
    if parallel.decode_context_parallel_size > 1:
        raise ValueError("engine_args.decode_context_parallel_size: HiSparse needs 1")
    if parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ValueError("the reference node is one process: tensor and data parallel sizes are 1")
    if not config.scheduler_config.scheduler_reserve_full_isl:
        raise ValueError("engine_args.scheduler_reserve_full_isl: HiSparse needs true")
    if config.lora_config is not None:
        raise ValueError("engine_args.enable_lora: the reference model has no LoRA layers")


def build_vllm_config(options: ReferenceOptions) -> VllmConfig:
    """The engine's configuration; ``engine_args`` of the operator pass through to vLLM.

    Raises ``ValueError`` (from vLLM or from hisparsed) on combinations that cannot run.
    """
    fixed: dict[str, Any] = {
        "model": str(options.model_folder),
        "served_model_name": [options.served_model_name],
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.gpu_blocks,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_hybrid_kv_cache_manager": False,
        "distributed_executor_backend": EXECUTOR,
        "scheduler_cls": SCHEDULER,
        "enforce_eager": True,
        "additional_config": {
            "hisparsed": {
                "ack_lag_steps": options.ack_lag_steps,
                "threads": options.threads,
                "bookkeeping": options.bookkeeping,
            }
        },
    }
    if options.speculative_tokens:
        # To vLLM's scheduler: drafts come from the executor, and have no KV.
        fixed["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": LONGEST_MATCH,
        }
    config = AsyncEngineArgs(**{**options.engine_args, **fixed}).create_engine_config()
    require_supported(config)
    config.additional_config["hisparsed"]["scratch_blocks"] = scratch_block_count(
        query_len=1 + options.speculative_tokens,
        topk=int(config.model_config.hf_config.index_topk),
        block_tokens=options.block_size,
        max_num_seqs=options.max_num_seqs,
    )
    config.attention_config.hisparse_config = HiSparseConfig(
        device_buffer_size=options.max_lease_rows, eager_host_mirror=options.eager_host_mirror
    )
    config.kv_transfer_config = kv_transfer_config(options.host_budget_bytes, options.handoff)
    config.__class__ = ReferenceVllmConfig
    return config


def kv_transfer_config(
    host_budget_bytes: int, handoff: HandoffOptions | None = None
) -> KVTransferConfig:
    """HiSparse with the whole budget as its pool, offloading on blocks lent from it.

    Between them, where the node hands prefixes over, the connector that does: vLLM loads
    from the first child that has tokens.
    """
    hisparse = {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": host_budget_bytes / 2**30},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "ReferenceOffloadingSpec",
            "spec_module_path": "hisparsed.engine.reference.connectors",
            # The pool owns no memory: vLLM only asks that this is not zero.
            "cpu_bytes_to_use": 1,
            "offload_prompt_only": False,
        },
    }
    handing_over = [handoff_connector(handoff)] if handoff is not None else []
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        # vLLM's default fails a call whose load failed.
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [hisparse, *handing_over, offloading]},
    )


def handoff_connector(options: HandoffOptions) -> dict[str, Any]:
    """MultiConnector's entry for ``HandoffConnector``; registers it in this process."""
    from hisparsed.engine.reference.handoff import connector

    extra = asdict(options)
    produces, consumes = extra.pop("produces"), extra.pop("consumes")
    role = {(True, False): "kv_producer", (False, True): "kv_consumer", (True, True): "kv_both"}
    return {
        "kv_connector": connector.NAME,
        "kv_connector_module_path": connector.__name__,
        "kv_role": role[produces, consumes],
        "kv_connector_extra_config": extra,
    }
