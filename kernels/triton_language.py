"""Shared by the Triton kernels: the decorator, words of the workspace, bit and error helpers.

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


ALIGNED = frozenset(
    (
        *("slot_pos", "slot_stamp", "max_capacity", "old_pos", "old_stamp"),
        *("bits", "ranks", "word_stride", "positions", "places", "misses"),
        *("host", "slab"),
    )
)
"""What is loaded 16 bytes at a time where it lies so: memory of the state, the workspace and the
node, which never moves, and its row lengths. All else may be any slice of anything."""


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` for a kernel that is launched; ``varying`` names numbers that change by the step.

    Triton compiles again for a number that is 1 or divides by 16, and for an address that does not
    divide by 16, which must not happen while requests wait or a graph is captured.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        anywhere = [
            name
            for name, parameter in signature(function).parameters.items()
            if name not in ALIGNED and parameter.annotation != "tl.constexpr"
        ]
        return triton.jit(
            function, do_not_specialize=varying, do_not_specialize_on_alignment=anywhere
        )

    return decorate


# Marks in physical_rows between the kernels of a step; real rows are 0 and more.
NOWHERE = tl.constexpr(-1)
BACKED = tl.constexpr(-2)

# Columns of Workspace.tally.
TALLIES = tl.constexpr(4)
OPEN = tl.constexpr(0)
TAKEN = tl.constexpr(1)
MISSING = tl.constexpr(2)
SAMPLED = tl.constexpr(3)

# Workspace.places: a slot below LOADED, with LOADED added where this step fills it; a miss that
# got no slot is -1 less its rank among the misses.
LOADED = tl.constexpr(1 << 15)

# The codes of the error latch; the figures that follow are in triton_errors.
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
def selected_bit(
    position: tl.tensor, bits: tl.tensor, used_words: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether the step selects each position (any number), its word, and its place there."""
    near = (position >= 0) & (position < used_words * 32)
    known = tl.where(near, position, 0)
    word = tl.load(bits + known // 32, mask=near, other=0)
    return ((word >> (known % 32)) & 1) != 0, word, known


@jit
def rank_of(position: tl.tensor, bits: tl.tensor, ranks: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """How many selected positions of the run lie below a selected one; junk if not ``wanted``."""
    known = tl.where(wanted, position, 0)
    word = tl.load(bits + known // 32, mask=wanted, other=0)
    below = word & ((1 << (known % 32)) - 1)
    return tl.load(ranks + known // 32, mask=wanted, other=0) + ones_in(below)


@jit
def is_ghost(position: tl.tensor, ghost_every: tl.constexpr) -> tl.tensor:
    """The same few lines as ``hisparsed.kernels.ghosts``."""
    hashed = (((position // ghost_every).to(tl.int64) * 0x9E3779B1) & 0xFFFFFFFF) >> 16
    return ((hashed.to(tl.int32) ^ position) & (ghost_every - 1)) == 0


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
    """Keep the first error since the host last read the latch; later ones are dropped."""
    if tl.atomic_cas(latch, tl.full((), 0, tl.int64), tl.full((), code, tl.int64)) == 0:
        tl.store(latch + 1, first)
        tl.store(latch + 2, second)
        tl.store(latch + 3, third)
        tl.store(latch + 4, fourth)
        tl.store(latch + 5, fifth)
