"""What the Triton kernels share: the decorator, words of the workspace, bit and error helpers.

Importing this imports Triton, which reads TRITON_INTERPRET then: only the Triton modules do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Callable[..., Any]], Any] = triton.jit


SLICED = (
    "topk",
    "request_ids",
    "state_of_request",
    "source_table",
    "resident_table",
    "hot_table",
    "scratch_table",
    "physical_rows",
    "attention_indices",
    "valid_counts",
    "miss_mask",
    "swap_host",
    "swap_physical",
    "swap_counts",
)
"""Tensors of which a step may bring any slice; those of the state and workspace never move."""


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` for a kernel that is launched; ``varying`` names numbers that change by the step.

    Triton compiles anew for a number that is 1 or divides by 16, and for an address that does not
    divide by 16, which must not happen while requests wait or a graph is captured.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        names = signature(function).parameters
        sliced = [name for name in SLICED if name in names]
        return triton.jit(
            function, do_not_specialize=varying, do_not_specialize_on_alignment=sliced
        )

    return decorate


# Marks in physical_rows between the kernels of a step; real rows are 0 and more.
NOWHERE = tl.constexpr(-1)
HIT = tl.constexpr(-2)
MISS = tl.constexpr(-3)

# Columns of Workspace.tally.
TALLIES = tl.constexpr(6)
REFERENCES = tl.constexpr(0)
RESIDENT = tl.constexpr(1)
LEASED = tl.constexpr(2)
OPEN = tl.constexpr(3)
TAKEN = tl.constexpr(4)
MISSING = tl.constexpr(5)

# What the error latch may say; the figures that follow are in triton_errors.
REQUEST_OUTSIDE = tl.constexpr(1)
STATE_OUTSIDE = tl.constexpr(2)
STATE_TWICE = tl.constexpr(3)
HOT_BLOCKS_MISSING = tl.constexpr(4)
SWAP_ROW_OUTSIDE = tl.constexpr(5)
SWAP_COUNT_OUTSIDE = tl.constexpr(6)
CAPACITY_OUTSIDE = tl.constexpr(7)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything but the stream."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Tensors and numbers by parameter name, compiled-in ones too."""
    warps: int

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], known: dict[str, Any], warps: int) -> Launch:
        """The launch that takes each of the kernel's parameters from ``known``."""
        return cls(kernel, grid, {name: known[name] for name in kernel.arg_names}, warps)

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.warps)


@jit
def ones_in(word: tl.tensor) -> tl.tensor:
    """Set bits of each int32, as int32; Triton has no popcount that its interpreter knows."""
    bits = word.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    bits = bits + (bits >> 16)
    return (bits & 0x3F).to(tl.int32)


@jit
def rank_of(
    position: tl.tensor, words: tl.tensor, ranks: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """How many misses of the run lie below a missed position; junk where not ``wanted``."""
    word = tl.load(words + position // 32, mask=wanted, other=0)
    below = word & ((1 << (position % 32)) - 1)
    return tl.load(ranks + position // 32, mask=wanted, other=0) + ones_in(below)


@jit
def is_ghost(position: tl.tensor, ghost_every: tl.constexpr) -> tl.tensor:
    return ghost_position(position // ghost_every, ghost_every) == position


@jit
def ghost_position(group: tl.tensor, ghost_every: tl.constexpr) -> tl.tensor:
    """The same few lines as ``hisparsed.kernels.ghosts``, int32."""
    hashed = ((group.to(tl.int64) * 0x9E3779B1) & 0xFFFFFFFF) >> 16
    return group * ghost_every + (hashed & (ghost_every - 1)).to(tl.int32)


@jit
def leading_blocks(table: tl.tensor, width: tl.tensor, blocks: tl.constexpr) -> tl.tensor:
    """Block ids before the first null."""
    leading = width
    for base in range(0, width, blocks):
        index = base + tl.arange(0, blocks)
        block = tl.load(table + index, mask=index < width, other=1)
        leading = tl.minimum(leading, tl.min(tl.where(block > 0, width, index), axis=0))
    return leading


@jit
def latch_error(
    latch: tl.tensor,
    code: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    fifth: tl.tensor,
) -> None:
    """Keep the first error since the host last looked; a full latch keeps what it has."""
    if tl.atomic_cas(latch, tl.full((), 0, tl.int64), tl.full((), code, tl.int64)) == 0:
        tl.store(latch + 1, first)
        tl.store(latch + 2, second)
        tl.store(latch + 3, third)
        tl.store(latch + 4, fourth)
        tl.store(latch + 5, fifth)
