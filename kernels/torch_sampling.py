"""Octiles and ghosts of the torch backend: what the miss curve is made of.

Reads the state as it was before the step stamped anything; writes only the sample arrays.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.ghosts import ghost_positions
from hisparsed.kernels.state import GHOST_BINS, OCTILES, ResolverState


def sample(
    state: ResolverState,
    at: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    stamp: torch.Tensor,
) -> None:
    """Count one step. All int64 [M] but ``stamp`` (int32): the union of ``torch_backend``.

    Ghost stamps follow every step; histograms grow on steps that ``sample_period`` divides.
    """
    group = position.div(state.ghost_every, rounding_mode="floor")
    ghost = (ghost_positions(group, state.ghost_every) == position).nonzero().squeeze(1)
    due = stamp % state.sample_period == 0
    if bool(due.any()):
        seen = ghost[due[ghost]]
        if seen.numel():
            _count_ghosts(state, at[seen], group[seen])
        hits = (due & (slot >= 0)).nonzero().squeeze(1)
        if hits.numel():
            _count_octiles(state, at[hits], slot[hits])
        missed = at[due & (slot < 0)]
        state.octile_misses.index_add_(0, missed, torch.ones_like(missed))
    state.ghost_stamp[at[ghost], group[ghost]] = stamp[ghost]


def _count_octiles(state: ResolverState, at: torch.Tensor, slot: torch.Tensor) -> None:
    rows, place = torch.unique_consecutive(at, return_inverse=True)
    held = (state.slot_stamp[rows].long() << 32) | state.slot_pos[rows].long()
    # Empty slots have negative keys (position -1), so they are deeper than every held one.
    order = held.argsort(dim=1, descending=True)
    depth = torch.empty_like(order)
    depth.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    octile = depth[place, slot] * OCTILES // state.capacity[at]
    state.octile.index_put_((at, octile), torch.ones_like(octile), accumulate=True)


def _count_ghosts(state: ResolverState, at: torch.Tensor, group: torch.Tensor) -> None:
    own = state.ghost_stamp[at, group].unsqueeze(1)
    others = state.ghost_stamp[at]
    groups = torch.arange(others.shape[1], device=others.device)
    # One sample a group, so samples of one stamp are ordered by group as by position.
    younger = (others > own) | ((others == own) & (groups > group.unsqueeze(1)))
    depth = younger.sum(dim=1) * state.ghost_every
    deepest = (depth * GHOST_BINS // state.max_capacity).clamp(max=GHOST_BINS)
    ghost_bin = torch.where(own.squeeze(1) > 0, deepest, GHOST_BINS)
    state.ghost.index_put_((at, ghost_bin), torch.ones_like(ghost_bin), accumulate=True)
