"""The model runner's Triton kernels: interpreted, and those that run over groups, in numpy.

The interpreter takes some milliseconds a program, and a node with HiSparse has many cache groups.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Launched:
    """A kernel that is launched as Triton's are: ``kernel[grid](*arguments)``."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self._body(grid, *args, **kwargs)


def _table(address: int, row: int, stride: int) -> Any:
    """Row of an int32 table whose rows are ``stride`` long."""
    return np.ctypeslib.as_array((ctypes.c_int32 * stride).from_address(address + 4 * row * stride))


@Launched
def gather_block_tables(
    grid: tuple[int, ...],
    batch: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    strides: torch.Tensor,
    counts: torch.Tensor,
    counts_stride: int,
    requests: int,
    *_window: torch.Tensor,
    MASK_SLIDING_WINDOW: bool = False,  # noqa: N803 (vLLM's name)
    **_: Any,
) -> None:
    """``_window``: since 0.33."""
    if MASK_SLIDING_WINDOW:
        raise RuntimeError("the stand-in knows no sliding window")
    rows = batch.tolist()
    addresses = zip(sources.tolist(), targets.tolist(), strides.tolist(), strict=True)
    for group, (source, target, stride) in enumerate(addresses):
        for at in range(grid[1]):
            to = _table(target, at, stride)
            if at >= requests:
                to[:] = 0
            else:
                blocks = int(counts[group, rows[at]])
                to[:blocks] = _table(source, rows[at], stride)[:blocks]


@Launched
def compute_slot_mappings(
    grid: tuple[int, ...],
    most_tokens: int,
    batch: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    strides: torch.Tensor,
    block_sizes: torch.Tensor,
    enabled: torch.Tensor,
    sharded: torch.Tensor,
    slots: torch.Tensor,
    slots_stride: int,
    rank: int,
    *,
    CP_SIZE: int,  # noqa: N803 (vLLM's names)
    PAD_ID: int,  # noqa: N803
    **_: Any,
) -> None:
    if CP_SIZE != 1:
        raise RuntimeError("the stand-in splits no context")
    rows, bounds, where = batch.tolist(), starts.tolist(), positions.numpy()
    each = zip(
        tables.tolist(), strides.tolist(), block_sizes.tolist(), enabled.tolist(), strict=True
    )
    for group, (table, stride, size, on) in enumerate(each):
        out = slots[group].numpy()
        for at, row in enumerate(rows):
            span = slice(bounds[at], bounds[at + 1])
            if row < 0 or not on:
                out[span] = PAD_ID
                continue
            of = where[span]
            blocks = _table(table, row, stride).astype(np.int64)
            out[span] = blocks[of // size] * size + of % size
        out[bounds[len(rows)] : most_tokens] = PAD_ID


def fused_embed_norm(
    input_ids: torch.Tensor,
    embed_table: torch.Tensor,
    chain_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Any:
    rows = embed_table[input_ids.view(-1)]
    if chain_weight is None:
        return rows
    wide = rows.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return rows, (wide * scale * chain_weight.double()).to(rows.dtype)


def quick_interpreter() -> None:
    """Make the interpreter's changes to Triton's language once, instead of at every call."""
    from triton.runtime import interpreter

    once = interpreter._patch_lang
    done: set[tuple[int, ...]] = set()

    class Kept:
        def restore(self) -> None:
            """Everything is interpreted here."""

    def patch(function: Any) -> Kept:
        seen = tuple(
            sorted(
                id(value)
                for value in function.__globals__.values()
                if inspect.ismodule(value) and value.__name__.startswith("triton.language")
            )
        )
        if seen not in done:
            done.add(seen)
            once(function)
        return Kept()

    interpreter._patch_lang = patch
