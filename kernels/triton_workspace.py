"""Scratch memory of the Triton backend: one workspace per device, shared by all states on it.

Nothing in it outlives a step: every word that a step reads it has written itself, so a step that
broke off, or one of another index group, leaves nothing that matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import torch

from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.triton_errors import device_key
from hisparsed.kernels.triton_language import TALLIES

_FEWEST_ROWS = 1024

_spaces: dict[tuple[str, int | None], Workspace] = {}
_captured: dict[tuple[str, int | None], WeakSet[ResolverState]] = {}
"""States whose steps a graph holds, and with them the addresses of their device's workspace."""


@dataclass(frozen=True)
class Workspace:
    """Device memory between the kernels of one step, int32 and flat.

    Lists of a run begin at its first row's first cell, what is kept by state row at that row.
    """

    first_row: torch.Tensor
    """[R]: first row of the run of a row, -1 for padding and for refused rows."""
    spills: torch.Tensor
    """[R]: misses beyond the capacity, at the first row of a run."""
    tally: torch.Tensor
    """[R, 4]: figures of a run, at its first row."""
    positions: torch.Tensor
    """[cells]: the union of a run by rank, ascending."""
    places: torch.Tensor
    """[cells]: by rank, the slot of a position or the number of its miss."""
    misses: torch.Tensor
    """[cells]: rank of each miss, ascending."""
    bits: torch.Tensor
    """[S, P / 32]: bitmap of the union."""
    ranks: torch.Tensor
    """Like ``bits``: how many of the union lie below each word."""
    old_pos: torch.Tensor
    """[S, B]: ``slot_pos`` before a sampled step."""
    old_stamp: torch.Tensor
    """[S, B]: ``slot_stamp`` before a sampled step, negative for hits."""
    old_ghosts: torch.Tensor
    """[S, ghosts]: ``ghost_pos`` before a step."""

    @classmethod
    def create(cls, sizes: dict[str, int], device: torch.device) -> Workspace:
        """``sizes``: words of each array, as ``sizes_for``."""
        return cls(
            **{
                name: torch.zeros(words, dtype=torch.int32, device=device)
                for name, words in sizes.items()
            }
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {name: array.numel() for name, array in vars(self).items()}


def word_stride(state: ResolverState) -> int:
    """Words of one state row's bitmap; whole 16-byte loads lie in one row."""
    return -(-state.max_positions // 512) * 16


def sizes_for(state: ResolverState, rows: int, width: int) -> dict[str, int]:
    """Words of each array for steps of at most ``rows`` rows of ``width`` positions."""
    states, most = state.num_states, max(rows, _FEWEST_ROWS)
    return {
        "first_row": most,
        "spills": most,
        "tally": most * TALLIES.value,
        "positions": rows * width,
        "places": rows * width,
        "misses": rows * width,
        "bits": states * word_stride(state),
        "ranks": states * word_stride(state),
        "old_pos": states * state.max_capacity,
        "old_stamp": states * state.max_capacity,
        "old_ghosts": states * state.ghost_pos.shape[1],
    }


def workspace(state: ResolverState, rows: int, width: int) -> Workspace:
    """The workspace of the state's device, large enough for a step of ``rows`` x ``width``.

    Raises ``RuntimeError`` where memory would be made while a graph is captured, or would move
    while a state lives whose steps a graph holds: a replay would write to memory that others own
    by then.
    """
    key = device_key(state.device)
    space = _spaces.get(key)
    held = _captured.setdefault(key, WeakSet())
    capturing = _capturing(state.device)
    made = {} if space is None else space.sizes
    needed = sizes_for(state, rows, width)
    if space is None or any(words > made[name] for name, words in needed.items()):
        if capturing or held:
            raise RuntimeError(
                f"a step of {rows} rows of {width} positions needs more scratch memory than was "
                f"made, for {made.get('positions', 0)} positions, and a graph "
                f"{'is being' if capturing else 'was'} captured; call reserve(state, rows={rows}, "
                f"topk={width}) before the first capture"
            )
        sizes = {name: max(words, made.get(name, 0)) for name, words in needed.items()}
        space = _spaces[key] = Workspace.create(sizes, state.device)
    if capturing:
        held.add(state)
    return space


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
