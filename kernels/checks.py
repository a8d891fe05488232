"""Shapes, dtypes and devices of what callers pass; the backends trust them afterwards.

Each error names the argument, what it is and the expected value. The backends check values, since
that needs a read of the data.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.step import Step

MOST_CELLS = 2**31 - 1
"""Top-k positions of one call: kernels number them in 32 bits."""


def check_topk(topk: torch.Tensor, device: torch.device) -> None:
    _expect("topk", topk, torch.int32, 2, device)
    if topk.numel() > MOST_CELLS:
        raise ValueError(f"topk has {topk.numel()} positions, at most {MOST_CELLS} go in one call")


def check_resolve(state: ResolverState, step: Step, out: Resolution) -> None:
    geometry, topk, request_ids = step.geometry, step.topk, step.request_ids
    requests = step.state_of_request.shape[0]
    _expect("request_ids", request_ids, torch.int32, 1, state.device)
    _expect("state_of_request", step.state_of_request, torch.int32, 1, state.device)
    if request_ids.shape[0] != topk.shape[0]:
        raise ValueError(
            f"request_ids has {request_ids.shape[0]} entries for {topk.shape[0]} rows of topk"
        )
    residents = state.num_states if geometry.resident_by_state else requests
    for name, table, rows in (
        ("source_table", step.source_table, requests),
        ("resident_table", step.resident_table, residents),
        ("hot_table", step.hot_table, requests),
    ):
        _expect(name, table, torch.int32, 2, state.device, contiguous=False)
        if table.shape[0] < rows:
            raise ValueError(f"{name} has {table.shape[0]} rows, needs {rows}")
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise ValueError(f"{name} must be contiguous within a row, got {table.stride()}")
    if step.scratch_table is not None:
        _expect("scratch_table", step.scratch_table, torch.int32, 1, state.device)
    if out.topk != topk.shape[1]:
        raise ValueError(f"out is made for a top-k of {out.topk}, topk has {topk.shape[1]}")
    if out.physical_rows.device != state.device:
        raise ValueError(f"out is on {out.physical_rows.device}, the state on {state.device}")
    if out.attention_indices.dtype == torch.int32 and not geometry.attention_fits_int32:
        raise ValueError(
            f"attention indices of {geometry.slab_blocks} blocks with a stride of "
            f"{geometry.attention_block_stride} rows do not fit int32; "
            "make the outputs with index_dtype=torch.int64"
        )


def check_gather(
    host: torch.Tensor,
    slab: torch.Tensor,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
) -> None:
    check_memory("host", host)
    check_memory("slab", slab)
    _expect("swap_host", swap_host, torch.int64, 2, slab.device)
    _expect("swap_physical", swap_physical, torch.int64, 2, slab.device)
    _expect("swap_counts", swap_counts, torch.int32, 1, slab.device)
    if swap_host.numel() > MOST_CELLS:
        raise ValueError(
            f"swap_host has {swap_host.numel()} entries, at most {MOST_CELLS} go in one call"
        )
    if swap_host.shape != swap_physical.shape or swap_counts.shape[0] != swap_host.shape[0]:
        raise ValueError(
            "swap_host, swap_physical and swap_counts must agree in rows, got "
            f"{tuple(swap_host.shape)}, {tuple(swap_physical.shape)} and {tuple(swap_counts.shape)}"
        )


def check_memory(name: str, memory: torch.Tensor) -> None:
    """``memory`` must be a flat byte view."""
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(
            f"{name} must be 1-D contiguous uint8, got {memory.dim()}-D {memory.dtype}; "
            "pass tensor.view(torch.uint8).view(-1)"
        )


def _expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    dim: int,
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    if tensor.dtype != dtype or tensor.dim() != dim:
        raise ValueError(f"{name} must be {dim}-D {dtype}, got {tensor.dim()}-D {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
