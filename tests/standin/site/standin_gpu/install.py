"""Puts the stand-ins where vLLM's worker modules look for what is compiled."""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from standin_gpu import compiled, evidence, triton_kernels
from standin_gpu.device import OnCard, on_host, runtime

_CACHE_OPS = (
    "swap_blocks_batch",
    "hisparse_resolve_residency",
    "hisparse_gather_compact",
    "hisparse_gather_plan",
    "hisparse_invalidate_written_slots",
    "concat_and_cache_mla",
    "concat_mla_q",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_indexer_k_quant_cache",
)


def _replace(name: str, value: Any, *modules: str) -> None:
    """Under its name in every module that has it already, and in those named."""
    for module in modules:
        __import__(module)
        setattr(sys.modules[module], name, value)


def cache_operators() -> None:
    """Copies, pinning and HiSparse: what runs without a model."""
    _replace("_load_cudart", lambda: runtime, "vllm.v1.kv_offload.cpu.host_register")
    for name in _CACHE_OPS:
        setattr(torch.ops._C_cache_ops, name, getattr(compiled, name))


def rest_while_waiting() -> None:
    """Processes sleep until vLLM's queue wakes them, and do not spin for a second first.

    A small machine has fewer cores than a node has processes.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0,)


@functools.cache
def install() -> None:
    """Once a process, before a model is built."""
    evidence.tell(role="worker")
    rest_while_waiting()
    cache_operators()
    torch.ops._C.vocab_parallel_embedding = compiled.vocab_parallel_embedding
    torch.ops._C.top_k_per_row_prefill = compiled.top_k_per_row_prefill
    _replace("_is_flashmla_available", lambda: (True, None), "vllm.v1.attention.ops.flashmla")
    _replace(
        "has_deep_gemm",
        lambda: True,
        "vllm.model_executor.layers.sparse_attn_indexer",
        "vllm.v1.attention.backends.mla.indexer",
    )
    _replace(
        "get_paged_mqa_logits_metadata",
        compiled.get_paged_mqa_logits_metadata,
        "vllm.v1.attention.backends.mla.indexer",
    )
    kernels = "vllm.models.deepseek_v32.common.kernels"
    attention = "vllm.models.deepseek_v32.attention"
    __import__(attention)
    _replace("fused_norm_rope", compiled.fused_norm_rope, kernels, attention)
    _replace("fused_q", compiled.fused_q, kernels, attention)
    for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"):
        _replace(
            name,
            getattr(compiled, name),
            "vllm.utils.deep_gemm",
            "vllm.model_executor.layers.sparse_attn_indexer",
        )
    _replace(
        "get_indexer_topk",
        compiled.IndexerTopk,
        "vllm.model_executor.layers.sparse_attn_indexer",
    )
    for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache"):
        _replace(
            name,
            getattr(compiled, name),
            "vllm.v1.attention.ops.flashmla",
            "vllm.v1.attention.backends.mla.flashmla_sparse",
        )
    _replace(
        "get_mla_metadata",
        lambda *_, **__: (None, None),
        "vllm.v1.attention.backends.mla.flashmla_sparse",
    )
    _replace(
        "triton_convert_req_index_to_global_index",
        compiled.convert_req_index_to_global_index,
        "vllm.v1.attention.backends.mla.sparse_utils",
        "vllm.v1.attention.backends.mla.flashmla_sparse",
        "vllm.v1.attention.backends.mla.index_group",
    )
    _replace(
        "get_accelerator_view_from_cpu_tensor",
        lambda tensor: tensor,
        "vllm.utils.torch_utils",
        "vllm.v1.worker.gpu.buffer_utils",
    )
    # Top-k and top-p by torch: the interpreter does not run that kernel of 0.33.
    _replace("HAS_TRITON", False, "vllm.v1.sample.ops.topk_topp_sampler")
    _replace("kernel_warmup", lambda worker: None, "vllm.v1.worker.gpu_worker")
    _replace(
        "fused_embed_norm",
        triton_kernels.fused_embed_norm,
        "vllm.model_executor.layers.fused_embed_norm",
        "vllm.models.deepseek_v32.nvidia.model",
    )
    for name in ("gather_block_tables", "compute_slot_mappings"):
        _replace(f"_{name}_kernel", getattr(triton_kernels, name), "vllm.v1.worker.gpu.block_table")
    triton_kernels.quick_interpreter()
    _draft_the_last_token()
    _name_regions()
    _count_chunk_batches()
    _exact_products()
    _weights()


def _draft_the_last_token() -> None:
    """Drafts that are sometimes right: random weights would never be.

    The MTP layer runs all the same, and writes its rows.
    """
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

    propose = MTPSpeculator.propose

    def proposed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(self, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            batch, last_sampled = args[0], args[7]
            drafts.copy_(last_sampled.flatten()[batch.idx_mapping.long()][:, None])
        return drafts

    MTPSpeculator.propose = proposed


@functools.cache
def tell_cards_from_host() -> None:
    """NIXL registers what is on a card as another kind of memory than what is on the host."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )

    register = NixlBaseConnectorWorker.register_kv_caches

    def registered(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        register(
            self,
            {
                name: cache if on_host(cache.data_ptr()) else cache.as_subclass(OnCard)
                for name, cache in kv_caches.items()
            },
        )

    NixlBaseConnectorWorker.register_kv_caches = registered


def _name_regions() -> None:
    """Tell which files in /dev/shm this worker maps."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    make = SharedOffloadRegion.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        evidence.tell(regions=[self.mmap_path.rpartition("/")[2]])

    SharedOffloadRegion.__init__ = made


def _count_chunk_batches() -> None:
    """Tell how often this rank stores to the offload pool and loads from it."""
    from hisparsed.engine.cuda.copies import CudaLane

    submit = CudaLane.submit

    def counted(self: Any, *batch: Any) -> Any:
        evidence.count(**{"chunk_loads" if self._source_is_stable else "chunk_stores": 1})
        return submit(self, *batch)

    CudaLane.submit = counted  # type: ignore[method-assign]


def _exact_products() -> None:
    """Products in float64, rounded once: a row's result is the same in every batch, and with any
    number of ranks."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def wide(weight: torch.Tensor) -> torch.Tensor:
        found = kept.get(id(weight))
        if found is None or found[0] is not weight:
            kept[id(weight)] = found = (weight, weight.double())
        return found[1]

    def linear(values: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        made = values.double() @ wide(weight).T
        if bias is not None:
            made = made + bias.double()
        return made.to(values.dtype)

    torch.nn.functional.linear = linear  # type: ignore[assignment]
    real_bmm = torch.bmm

    def bmm(left: torch.Tensor, right: torch.Tensor, *, out: Any = None) -> torch.Tensor:
        made = real_bmm(left.double(), right.double()).to(left.dtype)
        return made if out is None else out.copy_(made)

    torch.bmm = bmm  # type: ignore[assignment]
    whole = RowParallelLinear.forward

    def partial(self: Any, values: torch.Tensor, *args: Any) -> Any:
        if self.tp_size == 1:
            return whole(self, values, *args)
        if self.reduce_results or self.bias is not None or not self.return_bias:
            raise RuntimeError("the stand-in leaves sums to the norm that follows them")
        return values.double() @ wide(self.weight).T, None

    RowParallelLinear.forward = partial
    fused = "vllm.models.common.ops.fused_allreduce_rms_norm"
    __import__(fused)
    add = sys.modules[fused].tensor_model_parallel_all_reduce
    _replace("tensor_model_parallel_all_reduce", lambda sums: add(sums).to(torch.bfloat16), fused)


def _weights() -> None:
    """Dummy weights with which attention matters: each of its name's own, norms at one.

    A rank has its part of what one rank would have, so nodes with different numbers of ranks run
    the same model.
    """
    from vllm.model_executor.model_loader import dummy_loader

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        with torch.no_grad():
            shards = {
                id(shard.parameter): shard
                for module in model.modules()
                for shard in _shards(module)
            }
            for name, parameter in model.named_parameters():
                shard = shards.get(id(parameter)) or _Shard(parameter)
                parameter.copy_(shard.made(name).to(parameter.dtype))

    dummy_loader.DummyModelLoader.load_weights = load_weights


@dataclass(frozen=True)
class _Shard:
    """What rank ``rank`` of ``ranks`` has of a weight. ``sizes``: its parts along ``axis``, each
    split between the ranks."""

    parameter: torch.Tensor
    axis: int = 0
    sizes: tuple[int, ...] = ()
    rank: int = 0
    ranks: int = 1

    def made(self, name: str) -> torch.Tensor:
        shape = list(self.parameter.shape)
        if len(shape) < 2:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        parts = []
        for at, size in enumerate(self.sizes or shape[:1]):
            shape[self.axis] = size * self.ranks
            seed = hashlib.sha256(f"{name}/{at}".encode()).digest()[:4]
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
            whole = torch.empty(shape).normal_(generator=generator).mul_(1 / math.sqrt(shape[-1]))
            parts.append(whole.narrow(self.axis, self.rank * size, size))
        return torch.cat(parts, self.axis)


def _shards(module: torch.nn.Module) -> Iterator[_Shard]:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    at: Any = module
    if isinstance(module, linear.RowParallelLinear):
        yield _Shard(at.weight, 1, (at.weight.shape[1],), at.tp_rank, at.tp_size)
    elif isinstance(module, linear.ColumnParallelLinear):
        yield _Shard(at.weight, 0, tuple(at.output_partition_sizes), at.tp_rank, at.tp_size)
    elif isinstance(module, VocabParallelEmbedding) and at.tp_size > 1:
        rank = get_tensor_model_parallel_rank()
        yield _Shard(at.weight, 0, (at.num_embeddings_per_partition,), rank, at.tp_size)
