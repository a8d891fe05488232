"""Configurations that can never start on a CUDA node, each with the reason and the expected value.

Pure: the node's document, the model's facts and the machine's in, sentences out, before anything is
taken. vLLM finds most of these too, some only after minutes of loading weights. The doctor warns of
configurations that may not work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import DisaggregationConfig
from hisparsed.engine.cuda.model_config import BLOCK_TOKENS, ModelFacts
from hisparsed.plan.layout import HOST_ALIGNMENT
from hisparsed.policy.units import format_bytes

MAX_HOT_ROWS = 2**15
"""vLLM's kernel keeps the order of a hot buffer's slots in int16."""
HOST_SHARE = 0.95
"""vLLM refuses a host pool beyond this share of the memory that is available."""
NULL_AND_COPY_BLOCKS = 2
"""Host blocks that vLLM wants next to those of one longest request."""
SHARED_MEMORY_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (12, 0): 99 * 1024,
}
"""By compute capability: the most that one block of threads may have."""

_OWN = "the CUDA node sets it itself; remove it"
CUDA_ARGS = {
    **{
        name: f"set cuda.{name}"
        for name in (
            "tensor_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "kv_cache_dtype",
        )
    },
    "speculative_config": "set cuda.speculative_tokens",
    "block_size": _OWN,
    "distributed_executor_backend": _OWN,
    "additional_config": _OWN,
    "worker_extension_cls": _OWN,
}
"""Engine arguments that the CUDA node sets, each with what to do instead."""
NIXL_ARGS = {
    "bidirectional_kv_xfer": (
        "vLLM's NIXL reads from no node that keeps KV in host memory; remove it"
    ),
    "enforce_handshake_compat": (
        "a prefill node with another model, KV type or drafts would be read as if it had this "
        "node's; remove it, and such a prompt is computed here"
    ),
}
"""Options of NixlConnector that a decode node with HiSparse does not support."""
SIDE_CHANNEL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "host", "VLLM_NIXL_SIDE_CHANNEL_PORT": "port"}
"""Variables that say where NixlConnector listens, by keys of ``disaggregation``."""
_FULL = ("FULL", "2")
"""vLLM takes the name of a graph mode, or its number."""
_ONE_ONLY = {
    "pipeline_parallel_size": "HiSparse does not support pipeline parallelism; set "
    "cuda.tensor_parallel_size",
    "decode_context_parallel_size": "HiSparse does not support context parallelism; remove it",
    "prefill_context_parallel_size": "HiSparse does not support context parallelism; remove it",
    "data_parallel_size": "one daemon runs one engine; run a node for each replica",
    "nnodes": "the ranks share one host pool, so all are on one machine; remove it",
}
_WHOLE_STEPS = {"enable_dbo": (None, False), "ubatch_size": (None, 0, 1)}
"""Arguments with which vLLM computes a step as several batches at once, and where it does not."""
_ALWAYS_ON = {
    "scheduler_reserve_full_isl": "loads would wait for each other's host blocks",
    "enable_prefix_caching": "without it nothing in the host pools is ever read again",
    "enable_chunked_prefill": "a long prompt would have to fit on the GPU whole",
}


@dataclass(frozen=True)
class GpuFacts:
    total_bytes: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class MachineFacts:
    """Bytes. ``gpus`` are those that the engine may use."""

    available_bytes: int
    shm_free_bytes: int
    gpus: tuple[GpuFacts, ...]


def hot_rows(config: NodeConfig, topk: int, max_multiplier: float) -> int:
    """Rows of the largest hot buffer; ``max_multiplier`` is the policy's, in top-k."""
    cuda = config.cuda
    query_len = 1 + cuda.speculative_tokens
    if cuda.hot_rows is not None:
        return cuda.hot_rows
    return max(query_len * topk, math.ceil(max_multiplier * topk))


def argument_problems(config: NodeConfig) -> Iterator[str]:
    """Values of ``engine_args`` that are not allowed."""
    arguments, cuda = config.engine_args, config.cuda
    for name, value in arguments.items():
        if name in CUDA_ARGS:
            yield f"engine_args.{name}: {CUDA_ARGS[name]}"
        elif name in _ONE_ONLY and value not in (None, 1):
            yield f"engine_args.{name}: {value!r} cannot be; {_ONE_ONLY[name]}"
        elif cuda.kernels != "vllm" and value not in _WHOLE_STEPS.get(name, (value,)):
            yield (
                f"engine_args.{name}: {value!r} cannot be with cuda.kernels: {cuda.kernels}; "
                "hisparsed's kernels have one workspace a GPU, which two half batches at once "
                "would share; remove it, or set cuda.kernels: vllm"
            )
        elif name in _ALWAYS_ON and value not in (None, True):
            yield f"engine_args.{name}: {value!r} cannot be, {_ALWAYS_ON[name]}; remove it"
    if mapping_argument(arguments.get("attention_config")).get("hisparse_config") is not None:
        yield "engine_args.attention_config.hisparse_config: set cuda.hot_rows"
    mode = mapping_argument(arguments.get("compilation_config")).get("cudagraph_mode")
    if str(mode).rpartition(".")[2].upper() in _FULL:
        yield (
            "engine_args.compilation_config.cudagraph_mode: HiSparse does not run under FULL; "
            "write FULL_AND_PIECEWISE, which records decode steps whole, or remove it"
        )


def disaggregation_problems(
    own: DisaggregationConfig | None, environ: Mapping[str, str], *, nixl_is_there: bool
) -> Iterator[str]:
    """Values of ``disaggregation`` that are not allowed."""
    if own is None:
        return
    refused = own.refused_on("cuda")
    if refused is not None:
        yield f"{'.'.join(('disaggregation', *refused.key))}: {refused.message}; {refused.hint}"
        return
    for key in sorted(own.nixl.keys() & NIXL_ARGS.keys()):
        yield f"disaggregation.nixl.{key}: {own.nixl[key]!r} cannot be; {NIXL_ARGS[key]}"
    for name, key in SIDE_CHANNEL.items():
        value = str(getattr(own, key))
        if environ.get(name, value) != value:
            yield f"{name}: {environ[name]!r} is not disaggregation.{key}, {value}; unset it"
    if not nixl_is_there:
        yield (
            "disaggregation: vLLM fetches prefixes by NIXL, which is not installed; "
            "pip install nixl, or remove it"
        )


def environment_problems(environ: Mapping[str, str]) -> Iterator[str]:
    """Environment variables of vLLM with which HiSparse cannot run."""
    if environ.get("VLLM_USE_V2_MODEL_RUNNER") in ("0", "false", "False"):
        yield (
            "VLLM_USE_V2_MODEL_RUNNER: HiSparse runs in vLLM's second model runner only; unset it"
        )


def model_problems(config: NodeConfig, model: ModelFacts, max_multiplier: float) -> Iterator[str]:
    """What the model and the hot buffers do not allow."""
    cuda = config.cuda
    if cuda.hot_scratch and cuda.kernels == "vllm":
        yield (
            "cuda.hot_scratch: vLLM's kernels read through no scratch; set cuda.kernels: "
            "hisparsed or auto, or remove it"
        )
    if model.index_topk is None:
        yield (
            f"model: {config.model} ({model.model_type}) has no index_topk; HiSparse serves models "
            "with an indexer only, such as GLM-5.x or DeepSeek-V3.2"
        )
        return
    if model.nested_topk:
        yield (
            f"model: {config.model} has index_topk in its text_config alone, where vLLM's HiSparse "
            "does not look; use a model whose config.json has it at the top"
        )
    if model.model_type.startswith("deepseek_v4"):
        yield f"model: vLLM's HiSparse does not know {model.model_type}; use another model"
    if cuda.speculative_tokens and not model.draft_layers:
        yield (
            f"cuda.speculative_tokens: {config.model} has no MTP layer "
            "(num_nextn_predict_layers); set it to 0"
        )
    longest = model.max_positions
    if cuda.max_model_len is not None and longest is not None and cuda.max_model_len > longest:
        yield f"cuda.max_model_len: the model knows {longest} positions; set at most that"
    topk, query_len = model.index_topk, 1 + cuda.speculative_tokens
    rows, least = hot_rows(config, topk, max_multiplier), query_len * topk
    if rows < least:
        yield (
            f"cuda.hot_rows: {rows} rows do not hold what one step may select, {query_len} rows x "
            f"{topk}; give at least {least}, or lower cuda.speculative_tokens"
        )
    if rows > MAX_HOT_ROWS:
        yield (
            f"{_rows_from(config)}: {rows} rows are more than vLLM's kernels can number; "
            f"give at most {MAX_HOT_ROWS} ({MAX_HOT_ROWS / topk:g} x top-k)"
        )


def _rows_from(config: NodeConfig) -> str:
    """Where the number of hot rows comes from."""
    if config.cuda.hot_rows is not None:
        return "cuda.hot_rows"
    return f"hot.{'max' if config.cuda.kernels == 'hisparsed' else 'start'} of the policy"


def largest_pool(available_bytes: int) -> int:
    """The largest part of the free memory that vLLM takes, for all ranks together."""
    return int(available_bytes * HOST_SHARE)


def shared_pool_bytes(config: NodeConfig) -> int:
    """What the host pool takes of /dev/shm, where the ranks of a node share it."""
    return config.host_budget if config.cuda.tensor_parallel_size > 1 else 0


def machine_problems(config: NodeConfig, machine: MachineFacts) -> Iterator[str]:
    """What the machine lacks, whatever the model is; the doctor asks the same of memory."""
    ranks, budget = config.cuda.tensor_parallel_size, config.host_budget
    if len(machine.gpus) < ranks:
        yield (
            f"cuda.tensor_parallel_size: {ranks} GPUs are requested and {len(machine.gpus)} can be "
            "used; check nvidia-smi and CUDA_VISIBLE_DEVICES, or lower it"
        )
    most = largest_pool(machine.available_bytes)
    if budget > most:
        yield (
            f"host_budget: {format_bytes(budget)} for the node, whose ranks share one pool, but "
            f"{format_bytes(machine.available_bytes)} are free, of which vLLM takes at most 95%; "
            f"give at most {format_bytes(most)}, or end what holds memory"
        )
    if shared_pool_bytes(config) > machine.shm_free_bytes:
        yield (
            f"host_budget: {format_bytes(budget)}, but /dev/shm, where the ranks share it, has "
            f"{format_bytes(machine.shm_free_bytes)}; remount it larger (in a container: give it "
            "that size), or lower host_budget"
        )


def size_problems(
    config: NodeConfig, model: ModelFacts, machine: MachineFacts, max_multiplier: float
) -> Iterator[str]:
    """What is too small for the model; lower bounds only, so nothing possible is refused."""
    if model.index_topk is None:
        return
    yield from _host_rows(config, model)
    yield from _shared_memory(config, model.index_topk, machine, max_multiplier)
    yield from _gpu_memory(config, model, machine)


def _host_rows(config: NodeConfig, model: ModelFacts) -> Iterator[str]:
    length = config.cuda.max_model_len or model.max_positions
    if length is None:
        return
    blocks = -(-length // BLOCK_TOKENS) + NULL_AND_COPY_BLOCKS
    least = blocks * host_block_bytes(config, model)
    if config.host_budget < least:
        yield (
            f"host_budget: {format_bytes(config.host_budget)} cannot hold one request of "
            f"{length} tokens, {blocks} blocks; give at least {format_bytes(least)}, or lower "
            "cuda.max_model_len"
        )


def host_block_bytes(config: NodeConfig, model: ModelFacts) -> int:
    """One host block: all sparse-MLA layers of its tokens; whole pages where ranks share it."""
    layers = model.kv_layers(drafts=config.cuda.speculative_tokens > 0)
    page = layers * BLOCK_TOKENS * model.row_bytes(config.cuda.kv_cache_dtype)
    if config.cuda.tensor_parallel_size == 1:
        return page
    return -(-page // HOST_ALIGNMENT) * HOST_ALIGNMENT


def _shared_memory(
    config: NodeConfig, topk: int, machine: MachineFacts, max_multiplier: float
) -> Iterator[str]:
    rows = hot_rows(config, topk, max_multiplier)
    wanted = resolver_bytes(rows, (1 + config.cuda.speculative_tokens) * topk)
    limits = (SHARED_MEMORY_BYTES.get(gpu.capability or (0, 0)) for gpu in machine.gpus)
    least = min((limit for limit in limits if limit is not None), default=None)
    if least is not None and wanted > least:
        yield (
            f"{_rows_from(config)}: {rows} rows need {wanted} B of shared memory in vLLM's kernel "
            f"and this GPU has {least}; give fewer rows or lower cuda.speculative_tokens"
        )


def resolver_bytes(rows: int, union_rows: int) -> int:
    """Shared memory of vLLM's resolver a request, as its own check counts it since 0.31."""
    chunks = -(-rows // 32)
    return 4 * (2 * (union_rows + 1) + 3 * chunks + 7) + 2 * rows


def _gpu_memory(config: NodeConfig, model: ModelFacts, machine: MachineFacts) -> Iterator[str]:
    if model.weights_bytes is None or not machine.gpus:
        return
    ranks = config.cuda.tensor_parallel_size
    share = config.cuda.gpu_memory_utilization or 1.0
    most = int(min(gpu.total_bytes for gpu in machine.gpus) * share)
    weights = model.weights_bytes // ranks
    length = config.cuda.max_model_len or model.max_positions or 0
    indexers = model.indexers(drafts=config.cuda.speculative_tokens > 0)
    indexer = length * indexers * model.index_row_bytes
    if weights + indexer > most:
        yield (
            f"cuda.tensor_parallel_size: a GPU may take {format_bytes(most)}, but weights are "
            f"{format_bytes(weights)} on each of {ranks}, and the indexer KV of one request of "
            f"{length} tokens {format_bytes(indexer)}; use more GPUs, or lower cuda.max_model_len"
        )


def mapping_argument(value: Any) -> Mapping[str, Any]:
    """An argument that vLLM takes as a mapping, as JSON or as an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}
