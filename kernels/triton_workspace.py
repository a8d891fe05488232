"""Scratch memory of the Triton backend, allocated once a resolver state, and where it is kept.

Nothing in it outlives a step but emptiness: the kernels leave the sets of hits and misses empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from hisparsed.kernels.state import ResolverState
from hisparsed.kernels.triton_language import TALLIES

_FEWEST_ROWS = 1024

_spaces: WeakKeyDictionary[ResolverState, Workspace] = WeakKeyDictionary()


@dataclass
class Workspace:
    """Device memory between the kernels of one step, for one ``ResolverState``."""

    recorded: bool
    """A captured graph may hold these addresses, so they stay."""
    clean: bool
    """Every step that began has launched all its kernels."""

    first_row: torch.Tensor
    """int32 [R]: first row of the run of a row, -1 for padding."""
    spills: torch.Tensor
    """int32 [R]: misses beyond the capacity, at the first row of a run."""
    claim: torch.Tensor
    """int32 [S]: first row of the run that a state row serves."""
    tally: torch.Tensor
    """int32 [S, 6]: figures of the run that a state row serves."""
    touched: torch.Tensor
    """uint8 [S, B]: slots that this step selects; all 0 between steps."""
    misses: torch.Tensor
    """int32 [S, B]: missed positions that get a slot, ascending."""
    miss_bits: torch.Tensor
    """int32 [S, ceil(P / 32)]: bitmap of missed positions; all 0 between steps."""
    words: torch.Tensor
    """int32 like ``miss_bits``: the bitmap as finalise needs it."""
    ranks: torch.Tensor
    """int32 like ``miss_bits``: misses below each word."""
    ghosts_seen: torch.Tensor
    """int32 [S, G]: ghost samples that a sampled step selects."""

    @classmethod
    def create(cls, state: ResolverState, rows: int) -> Workspace:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=state.device)

        states, words = state.num_states, -(-state.max_positions // 32)
        return cls(
            recorded=False,
            clean=True,
            first_row=zeros(rows),
            spills=zeros(rows),
            claim=zeros(states),
            tally=zeros(states, TALLIES.value),
            touched=zeros(states, state.max_capacity, dtype=torch.uint8),
            misses=zeros(states, state.max_capacity),
            miss_bits=zeros(states, words),
            words=zeros(states, words),
            ranks=zeros(states, words),
            ghosts_seen=zeros(states, state.ghost_stamp.shape[1]),
        )


def workspace(state: ResolverState, rows: int) -> Workspace:
    """The workspace of a state for a step of ``rows``, made at its first step.

    Raises ``RuntimeError`` where memory would be made while a graph is captured, or would move
    after a graph has recorded it: a replay would write to memory that others own by then.
    """
    space = _spaces.get(state)
    capturing = _capturing(state.device)
    if space is None or space.first_row.shape[0] < rows:
        if capturing or (space is not None and space.recorded):
            made_for = 0 if space is None else space.first_row.shape[0]
            raise RuntimeError(
                f"a step of {rows} rows needs more scratch memory than was made, for {made_for} "
                f"rows, and a graph {'is being' if capturing else 'was'} captured; call "
                f"reserve(state, rows={rows}) before the first capture"
            )
        space = Workspace.create(state, max(_FEWEST_ROWS, 1 << (rows - 1).bit_length()))
        _spaces[state] = space
    space.recorded |= capturing
    return space


@contextmanager
def all_or_nothing(space: Workspace) -> Iterator[None]:
    """Around the launches of a step: what one that broke off has left is wiped by the next."""
    if not space.clean:
        space.touched.zero_()
        space.miss_bits.zero_()
    space.clean = False
    yield
    space.clean = True


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
