"""The Triton backend: prepares the launches of a step and of a gather.

For CUDA tensors; for CPU tensors where Triton interprets (TRITON_INTERPRET=1 before its import).
Both run in place on the caller's tensors. Grids and arguments depend on shapes only and nothing
is read back, so a CUDA graph can capture them after one eager call. Steps of one device follow one
another: they share its workspace.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton

from hisparsed.kernels.geometry import RowLayout
from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.step import Step
from hisparsed.kernels.triton_errors import latch, raise_latched
from hisparsed.kernels.triton_finalise import finalise
from hisparsed.kernels.triton_gather import gather_rows
from hisparsed.kernels.triton_language import Launch
from hisparsed.kernels.triton_plan import plan
from hisparsed.kernels.triton_workspace import word_stride, workspace

INTERPRETED = not isinstance(plan, triton.runtime.JITFunction)

_TURN = 2048
"""Top-k positions, words or slots that a plan looks at in one turn."""
_PART_CELLS = 256
"""Top-k positions of one program of the second kernel: eight per row, one per octile."""
_PART_SLOTS = 1024
_CHUNK = 256
"""Rows, blocks or ghosts that a program looks at in one turn."""
_GATHER_ENTRIES = 4
_PROGRAMS_PER_SM = 4
_PROGRAMS_INTERPRETED = 3


def resolve(state: ResolverState, step: Step, out: Resolution) -> None:
    """See ``hisparsed.kernels.api.resolve``; shapes and types are checked there.

    On a GPU wrong values do not raise: their requests get -1 (except for resident pages, if only
    their hot buffer is wrong) and write no state, and the error waits for ``raise_errors``.
    """
    _run(resolve_launches(state, step, out), state.device)
    _raise_on_cpu(state.device)


def resolve_launches(state: ResolverState, step: Step, out: Resolution) -> list[Launch]:
    """The two launches of one step, in stream order."""
    geometry, scratch = step.geometry, step.scratch_table
    rows, width = step.topk.shape
    part_cells = min(_PART_CELLS, triton.next_power_of_2(width))
    known = {
        **vars(state),
        **vars(workspace(state, rows, width)),
        **vars(out),
        "miss_mask": out.miss_mask.view(torch.uint8),
        "latch": latch(state.device),
        "topk": step.topk,
        "request_ids": step.request_ids,
        "state_of_request": step.state_of_request,
        # Without scratch any table serves: none of its blocks is read.
        "scratch_table": step.request_ids if scratch is None else scratch,
        "scratch_blocks": 0 if scratch is None else scratch.shape[0],
        **_table("source", step.source_table),
        **_table("resident", step.resident_table),
        **_table("hot", step.hot_table),
        "rows": rows,
        "width": width,
        "requests": step.state_of_request.shape[0],
        "num_states": state.num_states,
        "word_stride": word_stride(state),
        "ghosts": state.ghost_pos.shape[1],
        "host_rows": geometry.host_rows,
        "attention_block_stride": geometry.attention_block_stride,
        "block_size": geometry.block_size,
        "resident_by_state": geometry.resident_by_state,
        "part_cells": part_cells,
        "turn": _TURN,
        "slots": min(_TURN, triton.next_power_of_2(state.max_capacity)),
        "part_slots": min(_PART_SLOTS, triton.next_power_of_2(state.max_capacity)),
        "chunk": _CHUNK,
    }
    return [
        Launch.of(plan, (rows,), known, warps=16),
        Launch.of(finalise, (rows, triton.cdiv(width, part_cells)), known, warps=4),
    ]


def _table(name: str, table: torch.Tensor) -> dict[str, Any]:
    return {
        f"{name}_table": table,
        f"{name}_pages": table.shape[1],
        f"{name}_stride": table.stride(0),
    }


def gather(
    host: torch.Tensor,
    slab: torch.Tensor,
    layout: RowLayout,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
    *,
    pinned: bool = False,
) -> None:
    """See ``hisparsed.kernels.api.gather``; ``host`` is pinned where the slab is on a GPU.

    On a GPU entries outside the memory are omitted and wait for ``raise_errors``.
    """
    if slab.is_cuda and not (pinned or host.is_cuda or host.is_pinned()):
        raise ValueError("host must be pinned: the GPU reads its rows in place")
    if swap_host.numel() == 0:
        return
    launch = gather_launch(host, slab, layout, swap_host, swap_physical, swap_counts)
    _run([launch], slab.device)
    _raise_on_cpu(slab.device)


def gather_launch(
    host: torch.Tensor,
    slab: torch.Tensor,
    layout: RowLayout,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
) -> Launch:
    """The one launch of a gather."""
    aligned = _alignment(layout, host.data_ptr() | slab.data_ptr())
    word = 4 if aligned >= 4 else 1
    return Launch.of(
        gather_rows,
        (_gather_programs(slab.device),),
        {
            "host": host,
            "slab": slab,
            "swap_host": swap_host,
            "swap_physical": swap_physical,
            "swap_counts": swap_counts,
            "layer_offsets": _layer_offsets(layout, word, slab.device),
            "latch": latch(slab.device),
            "rows": swap_host.shape[0],
            "width": swap_host.shape[1],
            "layers": layout.layers,
            "host_rows": layout.host_rows(host.numel()),
            "slab_rows": layout.slab_rows(slab.numel()),
            "host_block_words": layout.host_block_bytes // word,
            "slab_block_words": layout.slab_block_bytes // word,
            "block_size": layout.block_size,
            "row_words": layout.row_bytes // word,
            "word_bytes": word,
            "aligned_words": aligned // word,
            "padded_words": triton.next_power_of_2(layout.row_bytes // word),
            "entries": _GATHER_ENTRIES,
            "chunk": _CHUNK,
        },
        warps=4,
    )


def _run(launches: list[Launch], device: torch.device) -> None:
    # Triton launches on the current device, not on that of the tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch.run()


def _raise_on_cpu(device: torch.device) -> None:
    """Where the interpreter runs nothing is in flight, so errors need not wait."""
    if device.type == "cpu":
        raise_latched(device)


def _alignment(layout: RowLayout, addresses: int) -> int:
    """Bytes, at most 16, that divide every address a row can have."""
    every = addresses | layout.row_bytes | layout.host_block_bytes | layout.slab_block_bytes
    for offset in (*layout.host_offsets, *layout.slab_offsets):
        every |= offset
    return min(every & -every, 16)


@cache
def _layer_offsets(layout: RowLayout, word: int, device: torch.device) -> torch.Tensor:
    both = (layout.host_offsets, layout.slab_offsets)
    return torch.tensor(both, dtype=torch.int64, device=device) // word


@cache
def _gather_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
