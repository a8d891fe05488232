"""Octiles and ghosts of the torch backend, from which the miss curve is made.

Reads the state as it was before the step stamped anything; writes only the sample arrays.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.ghosts import are_ghosts
from hisparsed.kernels.state import GHOST_BINS, OCTILES, ResolverState


def sample(
    state: ResolverState, at: torch.Tensor, position: torch.Tensor, slot: torch.Tensor
) -> None:
    """Count one step. All int64 [M]: the union of ``torch_backend``, by state row, ascending.

    Ghosts move to the front in every step; histograms grow where ``sample_period`` divides the
    clock.
    """
    due = int(state.clock) % state.sample_period == 0
    if due:
        hit = slot >= 0
        if bool(hit.any()):
            _count_octiles(state, at[hit], slot[hit])
        missed = at[~hit]
        state.octile_misses.index_add_(0, missed, torch.ones_like(missed))
    _move_ghosts(state, at, position, due)


def _count_octiles(state: ResolverState, at: torch.Tensor, slot: torch.Tensor) -> None:
    rows, place = torch.unique_consecutive(at, return_inverse=True)
    held = (state.slot_stamp[rows].long() << 32) | state.slot_pos[rows].long()
    # Empty slots have negative keys (position -1), so they are deeper than every held one.
    order = held.argsort(dim=1, descending=True)
    depth = torch.empty_like(order)
    depth.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    octile = depth[place, slot] * OCTILES // state.capacity[at]
    state.octile.index_put_((at, octile), torch.ones_like(octile), accumulate=True)


def _move_ghosts(state: ResolverState, at: torch.Tensor, position: torch.Tensor, due: bool) -> None:
    """Selected samples go to the front, the highest first; the last ones fall off the end."""
    rows, run = torch.unique_consecutive(at, return_inverse=True)
    old = state.ghost_pos[rows].long()
    sampled = are_ghosts(position, state.ghost_every)
    run, new = run[sampled], position[sampled]
    per_run = torch.bincount(run, minlength=rows.numel())
    span = state.max_positions
    owner = torch.arange(rows.numel(), device=old.device).unsqueeze(1)
    alive = old >= 0
    selected = alive & torch.isin(owner * span + old, run * span + new)
    if due:
        depth = (alive.cumsum(dim=1) - 1) * state.ghost_every
        depth = (depth * GHOST_BINS // state.max_capacity).clamp_(max=GHOST_BINS)
        which, index = selected.nonzero(as_tuple=True)
        at_bin = (rows[which], depth[which, index])
        state.ghost.index_put_(at_bin, torch.ones_like(which), accumulate=True)
        state.ghost[rows, GHOST_BINS] += per_run - selected.sum(dim=1)
    # New ones by run, the highest first, then the old ones that stay: the dead sink to the end.
    first = per_run.cumsum(0) - per_run
    front = old.new_full((rows.numel(), int(per_run.max())), -1)
    column = per_run[run] - 1 - (torch.arange(run.numel(), device=run.device) - first[run])
    front[run, column] = new
    both = torch.cat((front, old.masked_fill(selected, -1)), dim=1)
    order = (both < 0).to(torch.int8).argsort(dim=1, stable=True)[:, : old.shape[1]]
    state.ghost_pos[rows] = both.gather(1, order).to(torch.int32)
