"""The C++ backend for CPU tensors: passes addresses to the library and names its errors.

Calls release the GIL. Requests are spread over threads when a step is large enough.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from weakref import WeakKeyDictionary

import torch

from hisparsed.kernels import cpp_structs as structs
from hisparsed.kernels import refusals
from hisparsed.kernels.cpp_library import load
from hisparsed.kernels.geometry import RowLayout
from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.step import Step

_MOST_THREADS = 8
"""Copies and look-ups are bound by memory long before this many cores are busy."""

_arrays: WeakKeyDictionary[ResolverState, structs.ResolverArrays] = WeakKeyDictionary()


def resolve(state: ResolverState, step: Step, out: Resolution) -> None:
    """See ``hisparsed.kernels.api.resolve``; arguments are checked there."""
    geometry, scratch = step.geometry, step.scratch_table
    call = structs.ResolveStep(
        rows=step.topk.shape[0],
        topk=step.topk.shape[1],
        requests=step.state_of_request.shape[0],
        scratch_blocks=0 if scratch is None else scratch.shape[0],
        block_size=geometry.block_size,
        attention_block_stride=geometry.attention_block_stride,
        host_rows=geometry.host_rows,
        resident_by_state=geometry.resident_by_state,
        index_bytes=out.attention_indices.element_size(),
        threads=_threads(),
        positions=step.topk.data_ptr(),
        request_ids=step.request_ids.data_ptr(),
        state_of_request=step.state_of_request.data_ptr(),
        scratch=None if scratch is None else scratch.data_ptr(),
        source=_table(step.source_table),
        resident=_table(step.resident_table),
        hot=_table(step.hot_table),
        physical_rows=out.physical_rows.data_ptr(),
        attention_indices=out.attention_indices.data_ptr(),
        valid_counts=out.valid_counts.data_ptr(),
        miss_mask=out.miss_mask.data_ptr(),
        swap_host=out.swap_host.data_ptr(),
        swap_physical=out.swap_physical.data_ptr(),
        swap_counts=out.swap_counts.data_ptr(),
    )
    outcome = load().hisparsed_resolve(ctypes.byref(_arrays_of(state)), ctypes.byref(call))
    if outcome != structs.DONE:
        raise _resolve_error(outcome, state, list(call.error_figures))


def gather(
    host: torch.Tensor,
    slab: torch.Tensor,
    layout: RowLayout,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
) -> None:
    """See ``hisparsed.kernels.api.gather``; arguments are checked there."""
    host_offsets, slab_offsets = _offsets(layout)
    call = structs.GatherCall(
        host=host.data_ptr(),
        slab=slab.data_ptr(),
        host_rows=layout.host_rows(host.numel()),
        slab_rows=layout.slab_rows(slab.numel()),
        block_size=layout.block_size,
        row_bytes=layout.row_bytes,
        host_block_bytes=layout.host_block_bytes,
        slab_block_bytes=layout.slab_block_bytes,
        layers=layout.layers,
        host_offsets=ctypes.addressof(host_offsets),
        slab_offsets=ctypes.addressof(slab_offsets),
        rows=swap_host.shape[0],
        topk=swap_host.shape[1],
        threads=_threads(),
        swap_host=swap_host.data_ptr(),
        swap_physical=swap_physical.data_ptr(),
        swap_counts=swap_counts.data_ptr(),
    )
    outcome = load().hisparsed_gather(ctypes.byref(call))
    if outcome == structs.SWAP_ROW_OUTSIDE:
        host_row, physical_row = call.error_figures
        raise refusals.swap_row_outside(host_row, physical_row, call.host_rows, call.slab_rows)
    if outcome == structs.SWAP_COUNT_OUTSIDE:
        row, count = call.error_figures
        raise refusals.swap_count_outside(row, count, call.topk)
    if outcome != structs.DONE:
        raise MemoryError("no memory for the list of row copies")


def _table(table: torch.Tensor) -> structs.BlockTable:
    return structs.BlockTable(table.data_ptr(), table.shape[1], table.stride(0))


def _arrays_of(state: ResolverState) -> structs.ResolverArrays:
    arrays = _arrays.get(state)
    if arrays is None:
        arrays = structs.ResolverArrays(
            num_states=state.num_states,
            max_capacity=state.max_capacity,
            max_positions=state.max_positions,
            ghosts=state.ghost_pos.shape[1],
            sample_period=state.sample_period,
            ghost_every=state.ghost_every,
            slot_pos=state.slot_pos.data_ptr(),
            slot_stamp=state.slot_stamp.data_ptr(),
            capacity=state.capacity.data_ptr(),
            step=state.step.data_ptr(),
            counters=state.counters.data_ptr(),
            octile=state.octile.data_ptr(),
            octile_misses=state.octile_misses.data_ptr(),
            ghost_pos=state.ghost_pos.data_ptr(),
            ghost=state.ghost.data_ptr(),
            clock=state.clock.data_ptr(),
        )
        _arrays[state] = arrays
    return arrays


@cache
def _offsets(
    layout: RowLayout,
) -> tuple[ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64]]:
    kind = ctypes.c_int64 * layout.layers
    return kind(*layout.host_offsets), kind(*layout.slab_offsets)


@cache
def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def _resolve_error(outcome: int, state: ResolverState, figures: list[int]) -> Exception:
    first, second, needed, leased = figures
    match outcome:
        case structs.REQUEST_OUTSIDE:
            return refusals.request_outside(first, second)
        case structs.STATE_OUTSIDE:
            return refusals.state_outside(first, second, state.num_states)
        case structs.STATE_TWICE:
            return refusals.state_twice(first, second)
        case structs.HOT_BLOCKS_MISSING:
            capacity = int(state.capacity[first])
            return refusals.hot_blocks_missing(first, second, capacity, needed, leased)
        case structs.CAPACITY_OUTSIDE:
            return refusals.capacity_outside(first, second, state.max_capacity)
    return MemoryError("no memory for the resolver's work space")
