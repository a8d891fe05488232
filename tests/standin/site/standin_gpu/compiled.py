"""What vLLM compiles for CUDA, in torch: the operators that a step with HiSparse reaches.

Sums run in float64 and are rounded once, so that a row's result does not depend on the batch that
it is computed in. Layouts are vLLM's: 656 B a latent row, 132 B an indexer row, values of a page
before its scales. Copies really move the bytes that their descriptors name.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from typing import Any

import torch

from standin_gpu import evidence
from standin_gpu.device import pinned

NOPE, ROPE, TILE = 512, 64, 128
ROW_BYTES = NOPE + NOPE // TILE * 4 + 2 * ROPE
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


# --- copies ---------------------------------------------------------------------------


_stored: dict[tuple[int, int], bytes] = {}
"""Digest of what was copied to the host, by address and size."""


def _within(address: int, size: int) -> bool:
    """Whether the copy lies in pinned memory. Raises where it leaves the range it begins in."""
    for start, length in pinned.items():
        if start <= address < start + length:
            if address + size > start + length:
                raise RuntimeError("a copy straddles two registrations of pinned memory")
            return True
    return False


def _digest(address: int, size: int) -> bytes:
    return hashlib.blake2b(ctypes.string_at(address, size), digest_size=16).digest()


def swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool = False
) -> None:
    """Between the device and pinned memory. What comes back is what was stored there."""
    stored = loaded = 0
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        to_host, from_host = _within(target, size), _within(source, size)
        if to_host == from_host:
            raise RuntimeError("a copy is not between the device and pinned memory")
        if to_host:
            _stored[target, size] = _digest(source, size)
            stored += 1
        elif (source, size) in _stored:
            if _stored[source, size] != _digest(source, size):
                evidence.count(changed=1)
                raise RuntimeError("a host block was written after it was stored")
            loaded += 1
        ctypes.memmove(target, source, size)
    evidence.count(stored=stored, loaded_as_stored=loaded)


def forget(address: int, size: int) -> None:
    """Of pinned memory that others have written: it is not what was stored there."""
    for key in [key for key in _stored if key[0] < address + size and address < key[0] + key[1]]:
        del _stored[key]


# --- HiSparse -------------------------------------------------------------------------


def hisparse_resolve_residency(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_table: torch.Tensor,
    topk: torch.Tensor,
    device_rows: torch.Tensor,
    held: torch.Tensor,
    order: torch.Tensor,
    state_of: torch.Tensor,
    capacity: int,
    max_union_rows: int,
    _: Any,
    stats: torch.Tensor,
    physical: torch.Tensor,
    stride: int,
    request_of: torch.Tensor,
    source_table: torch.Tensor,
    block_size: int,
    __: Any,
    valid_counts: torch.Tensor | None,
    swap_host: torch.Tensor,
    swap_device: torch.Tensor,
    swap_counts: torch.Tensor,
    resident_table: torch.Tensor | None,
    resident_block_size: int,
    ___: int,
) -> None:
    """Least recently used rows leave; ``held`` and ``order`` are the state, by state row."""
    physical.fill_(-1)
    device_rows.fill_(-1)
    swap_counts.zero_()
    hits = misses = 0
    rows_of: dict[int, list[int]] = {}
    for row, request in enumerate(request_of.tolist()):
        if request >= 0 and int(state_of[request]) >= 0:
            rows_of.setdefault(request, []).append(row)
    for request, rows in rows_of.items():
        state = int(state_of[request])
        blocks, hot_blocks = source_table[request].tolist(), hot_table[request].tolist()
        pages = resident_table[state].tolist() if resident_table is not None else []
        slots, recency = held[state].tolist(), order[state].tolist()
        slot_of = {host: slot for slot, host in enumerate(slots) if host >= 0}
        used: dict[int, None] = {}
        wanted: list[tuple[int, int, int]] = []
        for row in rows:
            for column, position in enumerate(topk[row].tolist()):
                if position < 0:
                    continue
                page = pages[position // resident_block_size] if pages else 0
                if page > 0:
                    physical[row, column] = page * stride + position % resident_block_size
                    continue
                host = blocks[position // block_size] * block_size + position % block_size
                wanted.append((row, column, host))
                if host in slot_of:
                    used[slot_of[host]] = None
        free = [slot for slot in recency if slot not in used]
        for row, column, host in wanted:
            slot = slot_of.get(host)
            if slot is None:
                slot = free.pop(0)
                slot_of.pop(slots[slot], None)
                slots[slot], slot_of[host], used[slot] = host, slot, None
                at = hot_blocks[slot // block_size] * block_size + slot % block_size
                count = int(swap_counts[row])
                swap_host[row, count], swap_device[row, count] = host, at
                swap_counts[row] = count + 1
                misses += 1
            else:
                hits += 1
            block = hot_blocks[slot // block_size]
            physical[row, column] = block * stride + slot % block_size
        held[state] = torch.tensor(slots, dtype=held.dtype)
        kept = [slot for slot in recency if slot not in used]
        order[state] = torch.tensor([*kept, *used], dtype=order.dtype)
    if valid_counts is not None:
        valid_counts.copy_((topk >= 0).sum(dim=1))
    stats.view(torch.int64).add_(torch.tensor([hits, misses]))
    evidence.count(resolver_hits=hits, resolver_misses=misses)


def hisparse_gather_compact(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    swap_host: torch.Tensor,
    swap_device: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    size = hot_cache.shape[1]
    for row, count in enumerate(counts.tolist()):
        if count:
            at = swap_device[row, :count].long()
            hot_cache[at // size, at % size] = host_cache[swap_host[row, :count].long()]


def hisparse_gather_plan(
    host_rows: torch.Tensor,
    staged: torch.Tensor,
    row_ids: torch.Tensor,
    target_rows: torch.Tensor,
    wanted: torch.Tensor,
    *_: Any,
) -> None:
    at = torch.nonzero(wanted[0]).flatten()
    flat = staged.view(-1, staged.shape[-1])
    flat[target_rows[0][at].long()] = host_rows[row_ids[0][at].long()]


def hisparse_invalidate_written_slots(
    held: torch.Tensor, state_of: torch.Tensor, request_of: torch.Tensor, slots: torch.Tensor
) -> None:
    for request, slot in zip(request_of.tolist(), slots.tolist(), strict=True):
        if request >= 0 and slot >= 0:
            row = held[int(state_of[request])]
            row[row == slot] = -1


# --- rows of latent KV ----------------------------------------------------------------


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def pack_rows(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """[T, 512] and [T, 64] as uint8 [T, 656]."""
    tiles = latent.float().view(-1, NOPE // TILE, TILE)
    scale = _power_of_two((tiles.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-4))
    values = (tiles / scale).to(FP8).view(torch.uint8).view(-1, NOPE)
    scales = scale.view(-1, NOPE // TILE).contiguous().view(torch.uint8)
    tail = rope.reshape(-1, ROPE).to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((values, scales, tail), dim=1)


def unpack_rows(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 656] as float64 [N, 576]."""
    rows = rows.contiguous()
    values = rows[:, :NOPE].contiguous().view(FP8).float().view(-1, NOPE // TILE, TILE)
    scales = rows[:, NOPE : NOPE + 16].contiguous().view(torch.float32).unsqueeze(-1)
    tail = rows[:, NOPE + 16 :].contiguous().view(torch.bfloat16)
    return torch.cat(((values * scales).view(-1, NOPE).double(), tail.double()), dim=1)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    if kv_cache_dtype != "fp8_ds_mla":
        raise RuntimeError(f"the stand-in writes fp8_ds_mla rows only, not {kv_cache_dtype}")
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], kv_cache.shape[1]
    rows = pack_rows(kv_c[: kept.shape[0]][kept], k_pe[: kept.shape[0]][kept])
    kv_cache.view(torch.uint8)[slots // size, slots % size] = rows


def concat_mla_q(nope: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> None:
    heads = nope.shape[1]
    out[:, :heads, : nope.shape[2]] = nope
    out[:, :heads, nope.shape[2] :] = rope


def cp_gather_and_upconvert_fp8_kv_cache(
    cache: torch.Tensor,
    target: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    batch: int,
    seq_starts: torch.Tensor | None = None,
    host_cache: torch.Tensor | None = None,
    host_row_ids: torch.Tensor | None = None,
    device_row_ids: torch.Tensor | None = None,
) -> None:
    size = cache.shape[1]
    bounds = [*starts[:batch].tolist(), target.shape[0]]
    for request in range(batch):
        positions = torch.arange(bounds[request + 1] - bounds[request])
        at = block_table[request].long()[positions // size] * size + positions % size
        if host_row_ids is None or host_cache is None or device_row_ids is None:
            rows = cache[at // size, at % size]
        else:
            device = device_row_ids.flatten()[at].long()
            host = host_cache[host_row_ids.flatten()[at].long().clamp(min=0)]
            near = cache[device.clamp(min=0) // size, device.clamp(min=0) % size]
            rows = torch.where((device >= 0)[:, None], near, host)
        target[bounds[request] : bounds[request + 1]] = unpack_rows(rows.view(torch.uint8)).to(
            target.dtype
        )


def vocab_parallel_embedding(
    out: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    end: int,
    padding: int,
    added_start: int,
    added_end: int,
) -> None:
    own = (ids >= start) & (ids < end)
    out.copy_(torch.where(own[:, None], weight[torch.where(own, ids - start, 0)], 0))


# --- attention ------------------------------------------------------------------------


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: [H, 576] over [K, 576]; [H, 512] and [H]. Heads that pad are zeros."""
    out = torch.zeros((queries.shape[0], NOPE), dtype=torch.float64)
    lse = torch.zeros(queries.shape[0])
    heads = queries.any(dim=1).nonzero().flatten()
    keys = keys[valid]
    scores = queries[heads].double() @ keys.T * scale
    sums = torch.logsumexp(scores, dim=-1)
    out[heads] = torch.exp(scores - sums[:, None]).nan_to_num_(0.0) @ keys[:, :NOPE]
    lse[heads] = sums.float()
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = NOPE,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = q.new_empty((q.shape[0], q.shape[1], d_v)) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    rows = kv.view(-1, kv.shape[-1])
    for token in range(q.shape[0]):
        at = indices[token].flatten().long()
        result, lse[token] = _attend(q[token], rows[at.clamp(min=0)].double(), at >= 0, sm_scale)
        made[token] = result.to(made.dtype)
    return made, lse, lse


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not is_fp8_kvcache or indices is None or softmax_scale is None:
        raise RuntimeError("the stand-in attends to chosen rows of an FP8 cache only")
    pages = k_cache.squeeze(-2).view(torch.uint8)
    size = pages.shape[1]
    out = q.new_empty((*q.shape[:3], head_dim_v))
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for request in range(q.shape[0]):
        for row in range(q.shape[1]):
            at = indices[request, row].long()
            near = at.clamp(min=0)
            keys = unpack_rows(pages[near // size, near % size])
            result, lse[request, :, row] = _attend(q[request, row], keys, at >= 0, softmax_scale)
            out[request, row] = result.to(out.dtype)
    return out, lse


# --- the indexer ----------------------------------------------------------------------


def _index_keys(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """float64 [length, D] of one request; a page has its values first, then its scales."""
    size, width = cache.shape[1], cache.shape[-1]
    count = -(-length // size)
    flat = cache.reshape(cache.shape[0], -1)[pages[:count].long()].view(torch.uint8)
    values = flat[:, : size * (width - 4)].contiguous().view(FP8).view(-1, width - 4)
    scales = flat[:, size * (width - 4) :].contiguous().view(torch.float32).view(-1, 1)
    return (values.float() * scales).double()[:length]


def write_index_keys(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """float32 [T, D] quantised into pages."""
    size, dim = cache.shape[1], keys.shape[1]
    scale = _power_of_two(keys.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX)
    values = (keys / scale).to(FP8).view(torch.uint8)
    scales = scale.contiguous().view(torch.uint8)
    flat = cache.view(torch.uint8).as_strided(
        (cache.shape[0], size * cache.shape[2]), (cache.stride(0), 1)
    )
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, at = flat[slot // size], slot % size
            page[at * dim : (at + 1) * dim] = values[row]
            page[size * dim + 4 * at : size * dim + 4 * at + 4] = scales[row]


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, H, D], [N, D], [M, H]: float32 [M, N]."""
    heads = torch.einsum("mhd,nd->mhn", q.double(), keys).relu_()
    return torch.einsum("mhn,mh->mn", heads, weights.double()).float()


def cp_gather_indexer_k_quant_cache(
    cache: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    block_table: torch.Tensor,
    bounds: torch.Tensor,
) -> None:
    size, dim = cache.shape[1], values.shape[1]
    flat = cache.view(torch.uint8).as_strided(
        (cache.shape[0], size * cache.shape[2]), (cache.stride(0), 1)
    )
    ends = bounds.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(ends)):
        count = -(-(end - start) // size)
        pages = flat[block_table[request, :count].long()]
        near = pages[:, : size * dim].reshape(-1, dim)[: end - start]
        values.view(torch.uint8)[start:end] = near
        scales.view(torch.uint8)[start:end] = pages[:, size * dim :].reshape(-1, 4)[: end - start]


def fp8_fp4_mqa_logits(
    q: Any,
    kv: Any,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    longest: int = 0,
    *,
    clean_logits: bool = False,
) -> torch.Tensor:
    """A column a key; since 0.33 of each row's own keys, of which one has ``longest`` at most."""
    keys = (kv[0].float() * kv[1].view(-1, 1)).double().nan_to_num_(0.0)
    scores = _scores(q[0].float(), keys, weights)
    if not longest:
        return scores
    own = torch.full((scores.shape[0], longest), -math.inf)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        own[row, : end - start] = scores[row, start:end]
    return own


def top_k_per_row_prefill(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    *_: Any,
) -> None:
    width = indices.shape[1]
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        indices[row] = _best(logits[row, start:end], width)


def _best(scores: torch.Tensor, width: int) -> torch.Tensor:
    """Positions of the highest, in order of position; of equals the earliest."""
    count = min(width, scores.shape[0])
    found = torch.sort(scores, descending=True, stable=True).indices[:count]
    result = torch.full((width,), -1, dtype=torch.int32)
    result[:count] = torch.sort(found).values.to(torch.int32)
    return result


def fp8_fp4_paged_mqa_logits(
    q: Any,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    schedule: Any,
    max_model_len: int,
    clean_logits: bool = False,
    indices: Any = None,
) -> torch.Tensor:
    values = q[0]
    batch, rows = values.shape[:2]
    logits = torch.full((batch * rows, max_model_len), -math.inf)
    pages = cache.squeeze(-2)
    pages = pages.view(torch.uint8).as_strided(
        (pages.shape[0], pages.shape[1], pages.shape[2]),
        (pages.stride(0), pages.shape[2], 1),
    )
    for request in range(batch):
        length = int(lengths[request].max())
        if length <= 0:
            continue
        keys = _index_keys(pages, tables[request], length)
        at = slice(request * rows, (request + 1) * rows)
        logits[at, :length] = _scores(values[request].float(), keys, weights[at])
    return logits


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_size: int, num_sms: int, indices: Any = None
) -> torch.Tensor:
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32)


class IndexerTopk:
    """The decode step's top-k."""

    def __init__(self, backend: str = "auto") -> None:
        self.topk_backend = backend

    def __call__(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        rows: int,
        indices: torch.Tensor,
        width: int,
        max_seq_len: int,
    ) -> None:
        flat = lengths.flatten().tolist()
        for row in range(indices.shape[0]):
            if len(flat) == indices.shape[0]:
                length = flat[row]
            else:
                length = flat[row // rows] - rows + 1 + row % rows
            indices[row] = _best(logits[row, : max(length, 0)], width)


# --- the model's fused kernels --------------------------------------------------------


def _rms(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = values.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def _rotate(
    values: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """[T, ..., D] float64; the first 2 x half dimensions turn."""
    half = table.shape[-1] // 2
    row = table[positions].double().view(positions.shape[0], *[1] * (values.dim() - 2), 2 * half)
    cos, sin = row[..., :half], row[..., half:]
    turned = values.clone()
    if interleaved:
        first, second = values[..., 0 : 2 * half : 2], values[..., 1 : 2 * half : 2]
        turned[..., 0 : 2 * half : 2] = first * cos - second * sin
        turned[..., 1 : 2 * half : 2] = second * cos + first * sin
    else:
        first, second = values[..., :half], values[..., half : 2 * half]
        turned[..., :half] = first * cos - second * sin
        turned[..., half : 2 * half] = second * cos + first * sin
    return turned


def fused_norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_weight: torch.Tensor,
    q_eps: float,
    kv_c: torch.Tensor,
    kv_weight: torch.Tensor,
    kv_eps: float,
    k_pe: torch.Tensor,
    k_table: torch.Tensor,
    index_k: torch.Tensor | None,
    index_weight: torch.Tensor | None,
    index_bias: torch.Tensor | None,
    index_eps: float,
    index_table: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    *,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    mla_kv_cache: torch.Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: torch.Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    latent = _rms(kv_c, kv_weight, kv_eps).to(kv_c.dtype)
    rope = _rotate(k_pe.double(), k_table, positions, interleaved=True).to(k_pe.dtype)
    if kv_c_out is not None:
        kv_c_out.copy_(latent)
    if k_pe_out is not None:
        k_pe_out.copy_(rope)
    if mla_kv_cache is not None and slot_mapping is not None:
        concat_and_cache_mla(
            latent, rope, mla_kv_cache, slot_mapping, mla_kv_cache_dtype, mla_k_scale
        )
    if has_indexer:
        topk_indices_buffer[: positions.shape[0]] = -1
        if indexer_k_cache is not None and index_k is not None:
            wide = index_k.double()
            mean = wide.mean(-1, keepdim=True)
            var = (wide - mean).square().mean(-1, keepdim=True)
            normed = (wide - mean) * torch.rsqrt(var + index_eps) * index_weight + index_bias
            keys = _rotate(normed, index_table, positions, interleaved=index_rope_interleave)
            slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
            write_index_keys(keys.float(), indexer_k_cache, slots[: positions.shape[0]])
    return _rms(q_c, q_weight, q_eps).to(q_c.dtype)


def fused_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_table: torch.Tensor,
    index_q: torch.Tensor | None,
    index_table: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    softmax_scale: float,
    head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[Any, Any, torch.Tensor]:
    if quantize_mqa:
        raise RuntimeError("the stand-in's attention takes queries in bfloat16")
    turned = _rotate(q_pe.double(), q_table, positions, interleaved=True).to(q_pe.dtype)
    if not has_indexer or index_q is None or index_weights is None or index_table is None:
        return None, None, turned
    wide = _rotate(
        index_q.double(), index_table, positions, interleaved=index_rope_interleave
    ).float()
    scale = _power_of_two(wide.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX)
    weights = index_weights.float() * scale.squeeze(-1) * softmax_scale * head_scale
    return (wide / scale).to(FP8), weights, turned


def convert_req_index_to_global_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    BLOCK_SIZE: int = 64,  # noqa: N803 (vLLM's names)
    BLOCK_STRIDE_ROWS: int | None = None,  # noqa: N803
    NUM_TOPK_TOKENS: int = 2048,  # noqa: N803
    BLOCK_N: int = 128,  # noqa: N803
    HAS_PREFILL_WORKSPACE: bool = False,  # noqa: N803
    prefill_workspace_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    return_valid_counts: bool = False,
    out: torch.Tensor | None = None,
    valid_counts_out: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    stride = BLOCK_SIZE if BLOCK_STRIDE_ROWS is None else BLOCK_STRIDE_ROWS
    tokens = token_indices.long()
    pages = tokens.clamp(min=0) // BLOCK_SIZE
    invalid = (tokens < 0) | (pages >= block_table.shape[1])
    requests = req_id.long().clamp(min=0)
    rows = block_table.long()[requests if idx_mapping is None else idx_mapping.long()[requests]]
    found = torch.gather(rows, 1, pages.clamp(max=block_table.shape[1] - 1))
    result = found * stride + tokens % BLOCK_SIZE
    if HAS_PREFILL_WORKSPACE and prefill_workspace_request_ids is not None:
        request = prefill_workspace_request_ids[: tokens.shape[0]].long()
        start = prefill_workspace_starts.long()[request.clamp(min=0)]
        result = torch.where((request >= 0)[:, None], start[:, None] + tokens, result)
    result = torch.where(invalid, -1, result).to(torch.int32)
    counts = (~invalid).sum(dim=1, dtype=torch.int32)
    if out is not None:
        out.copy_(result)
        result = out
    if valid_counts_out is not None:
        valid_counts_out.copy_(counts)
        counts = valid_counts_out
    return (result, counts) if return_valid_counts else result
