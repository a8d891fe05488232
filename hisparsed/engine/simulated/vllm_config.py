"""vLLM's configuration for the simulated node: a described node's sizes, scaled to a part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from vllm.config import HiSparseConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from hisparsed.config.node_description import NodeDescription
from hisparsed.engine.reference.vllm_config import ReferenceVllmConfig
from hisparsed.engine.scratch import scratch_block_count
from hisparsed.plan.layout import real_layout, scaled_seqs, step_tokens

EXECUTOR = "hisparsed.engine.simulated.executor.SimulatedExecutor"
SCHEDULER = "hisparsed.engine.scheduler.HisparsedScheduler"


@dataclass(frozen=True)
class SimulatedOptions:
    """What to simulate. Bytes are those of the whole node; ``scale`` takes its part of them."""

    node: NodeDescription
    model_folder: Path
    host_budget_bytes: int
    max_lease_rows: int
    max_model_len: int
    scale: Fraction = Fraction(1)
    hisparse: bool = True
    """Without it vLLM's own offloading holds all KV and has the whole budget."""
    scratch: bool = True
    """Whether rows beyond a hot buffer can go through shared scratch blocks."""
    offload_prompt_only: bool = False
    eviction: str = "lru"
    store_threshold: int = 0
    copies: int = 1
    """Of the indexer, in the offload pool."""
    bookkeeping: str = "hisparsed"
    """``hisparsed`` or ``vllm``: who keeps HiSparse's pages; the outcome is the same."""
    seed: int = 0


def gpu_blocks(options: SimulatedOptions) -> int:
    """Blocks of the scaled GPU pool; without HiSparse a block holds all KV of its tokens."""
    layout = real_layout(options.node, 1)
    blocks = layout.gpu_blocks if options.hisparse else layout.baseline_blocks
    return int(blocks * options.scale)


def build_vllm_config(options: SimulatedOptions) -> VllmConfig:
    """Raises ``ValueError`` (vLLM's own) on sizes that cannot run."""
    node, scale = options.node, options.scale
    engine = node.engine
    block_tokens = engine.block_tokens
    max_num_seqs = scaled_seqs(node, scale)
    hisparsed: dict[str, Any] = {
        "node": node.model_dump(mode="json"),
        "seed": options.seed,
        "stands_for": float(1 / scale),
        "offload_copies": options.copies,
        "bookkeeping": options.bookkeeping,
    }
    if options.hisparse and options.scratch:
        hisparsed["scratch_blocks"] = scratch_block_count(
            query_len=node.query_len,
            topk=node.model.topk,
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
        )
    fixed: dict[str, Any] = {
        "model": str(write_model_folder(options)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": options.max_model_len,
        "block_size": block_tokens,
        "num_gpu_blocks_override": gpu_blocks(options),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": step_tokens(node, scale),
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_hybrid_kv_cache_manager": False,
        "distributed_executor_backend": EXECUTOR,
        "enforce_eager": True,
        "additional_config": {"hisparsed": hisparsed},
    }
    if engine.speculative_tokens:
        # The drafts are made up; vLLM only has to schedule and settle them.
        fixed["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": engine.speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 1,
        }
    if options.hisparse:
        fixed["scheduler_cls"] = SCHEDULER
    config = EngineArgs(**fixed).create_engine_config()
    if options.hisparse:
        config.attention_config.hisparse_config = HiSparseConfig(
            device_buffer_size=options.max_lease_rows
        )
        config.kv_transfer_config = _hisparse_transfer_config(options)
    else:
        config.kv_transfer_config = _standard_transfer_config(options)
    config.__class__ = ReferenceVllmConfig
    return config


def write_model_folder(options: SimulatedOptions) -> Path:
    """A ``config.json`` that vLLM takes for a small dense model with an indexer's top-k."""
    options.model_folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": options.max_model_len,
        "torch_dtype": "float32",
        "index_topk": options.node.model.topk,
    }
    (options.model_folder / "config.json").write_text(json.dumps(config, indent=1))
    return options.model_folder


def _hisparse_transfer_config(options: SimulatedOptions) -> KVTransferConfig:
    host_bytes = int(options.host_budget_bytes * options.scale)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": "HiSparseConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"host_pool_gib": host_bytes / 2**30},
                },
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "spec_name": "SimulatedOffloadingSpec",
                        "spec_module_path": "hisparsed.engine.simulated.connectors",
                        # The pool owns no memory: vLLM only asks that this is not zero.
                        "cpu_bytes_to_use": 1,
                        **_store_options(options),
                    },
                },
            ]
        },
    )


def _standard_transfer_config(options: SimulatedOptions) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "StandardOffloadingSpec",
            "spec_module_path": "hisparsed.engine.simulated.connectors",
            "cpu_bytes_to_use": int(options.host_budget_bytes * options.scale),
            **_store_options(options),
        },
    )


def _store_options(options: SimulatedOptions) -> dict[str, Any]:
    return {
        "offload_prompt_only": options.offload_prompt_only,
        "eviction_policy": options.eviction,
        "store_threshold": options.store_threshold,
    }
