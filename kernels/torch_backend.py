"""The resolver in torch operations: the reference backend, for any device.

Vectorised over the requests of a step; results are integer-equal to every other backend. It
reads sizes back from the device, so it is not for graph capture: that is the Triton backend's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsed.kernels import refusals, torch_sampling
from hisparsed.kernels.geometry import Geometry
from hisparsed.kernels.resolution import Resolution
from hisparsed.kernels.state import COUNTERS, ResolverState
from hisparsed.kernels.step import Step

_NOT_A_VICTIM = 2**63 - 1


@dataclass(frozen=True)
class Runs:
    """Requests of this step: ``U`` runs of consecutive rows with one request id."""

    of_row: torch.Tensor
    """int64 [R]: run of a row; padding rows get ``U``."""
    request: torch.Tensor
    state: torch.Tensor
    first_row: torch.Tensor

    @property
    def count(self) -> int:
        return self.request.shape[0]


@dataclass(frozen=True)
class Union:
    """Distinct host-backed positions of each run, by run, then ascending: ``M`` entries."""

    run: torch.Tensor
    position: torch.Tensor
    state: torch.Tensor
    stamp: torch.Tensor
    """int32 [M]: the new step of the run."""
    slot: torch.Tensor
    """int64 [M]: slot before this step, -1 for a miss."""


def resolve(state: ResolverState, step: Step, out: Resolution) -> None:
    """See ``hisparsed.kernels.api.resolve``; arguments are checked there."""
    out.physical_rows.fill_(-1)
    out.miss_mask.zero_()
    out.swap_counts.zero_()
    runs = _find_runs(state, step.request_ids, step.state_of_request)
    if runs.count:
        _resolve_runs(state, step, runs, out)
    size = step.geometry.block_size
    attention = out.physical_rows.div(size, rounding_mode="floor")
    attention *= step.geometry.attention_block_stride - size
    attention += out.physical_rows
    nowhere = out.physical_rows < 0
    out.attention_indices.copy_(attention.masked_fill_(nowhere, -1))
    torch.sum(~nowhere, dim=1, dtype=torch.int32, out=out.valid_counts)


def _find_runs(
    state: ResolverState, request_ids: torch.Tensor, state_of_request: torch.Tensor
) -> Runs:
    request = request_ids.long()
    _check_ids(state, request, state_of_request)
    states = state_of_request[request.clamp(min=0)].long()
    live = (request >= 0) & (states >= 0)
    starts = live.clone()
    starts[1:] &= (request[1:] != request[:-1]) | ~live[:-1]
    first_row = starts.nonzero().squeeze(1)
    of_row = (starts.cumsum(0) - 1).masked_fill_(~live, first_row.numel())
    run_states = states[first_row]
    by_state, order = run_states.sort(stable=True)
    twice = (by_state[1:] == by_state[:-1]).nonzero()
    if twice.numel():
        again = int(twice[0, 0]) + 1
        raise refusals.state_twice(int(by_state[again]), int(request[first_row[order[again]]]))
    return Runs(of_row, request[first_row], run_states, first_row)


def _check_ids(state: ResolverState, request: torch.Tensor, state_of_request: torch.Tensor) -> None:
    unknown = request >= state_of_request.shape[0]
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0, 0])
        raise refusals.request_outside(row, int(request[row]))
    outside = state_of_request[request[request >= 0]] >= state.num_states
    if bool(outside.any()):
        owner = int(request[request >= 0][outside][0])
        raise refusals.state_outside(owner, int(state_of_request[owner]), state.num_states)


def _resolve_runs(state: ResolverState, step: Step, runs: Runs, out: Resolution) -> None:
    geometry, size = step.geometry, step.geometry.block_size
    position = step.topk.long()
    cell_run = runs.of_row.unsqueeze(1).expand_as(position)
    real = (position >= 0) & (cell_run < runs.count)
    run = cell_run.clamp(max=runs.count - 1)
    block = position.div(size, rounding_mode="floor")
    offset = position - block * size

    owner = runs.state if geometry.resident_by_state else runs.request
    resident_block = _look_up(step.resident_table, owner[run], block, real)
    resident = resident_block > 0
    out.physical_rows.copy_(
        torch.where(resident, resident_block * size + offset, out.physical_rows)
    )
    source_block = _look_up(
        step.source_table, runs.request[run], block, real & (position < state.max_positions)
    )
    host_row = source_block * size + offset
    backed = ~resident & (source_block > 0) & (host_row < geometry.host_rows)

    counts = torch.zeros((len(COUNTERS), runs.count), dtype=torch.int64, device=position.device)
    counts[1] = torch.bincount(run[resident], minlength=runs.count)
    keys = run[backed] * state.max_positions + position[backed]
    counts[0] = counts[1] + torch.bincount(run[backed], minlength=runs.count)
    if keys.numel():
        found, cell_of = torch.unique(keys, return_inverse=True)
        union = _open_step(state, runs, found)
        _check_hot_blocks(state, step, runs, union)
        rows, is_miss = _plan(state, step, runs, union, counts)
        out.physical_rows[backed] = rows[cell_of]
        loaded = is_miss & (rows >= 0)
        out.miss_mask[backed] = loaded[cell_of]
        host_of = torch.empty_like(rows)
        host_of[cell_of] = host_row[backed]
        _write_swaps(runs, union.run[loaded], host_of[loaded], rows[loaded], out)
    state.counters.index_add_(0, runs.state, counts.t())


def _look_up(
    table: torch.Tensor, row: torch.Tensor, block: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Block ids as int64; null outside the table and where not wanted."""
    width = table.shape[1]
    if width == 0:
        return torch.zeros_like(block)
    inside = wanted & (block < width)
    return torch.where(inside, table[row, block.clamp(0, width - 1)].long(), 0)


def _open_step(state: ResolverState, runs: Runs, keys: torch.Tensor) -> Union:
    run = keys.div(state.max_positions, rounding_mode="floor")
    position = keys - run * state.max_positions
    at = runs.state[run]
    return Union(
        run=run,
        position=position,
        state=at,
        stamp=state.step[at] + 1,
        slot=_slots_of(state, runs, run, position),
    )


def _slots_of(
    state: ResolverState, runs: Runs, run: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Slot of each entry of the union, -1 none, by a map of what the step selects."""
    used = int(position.max()) + 1
    # Only the entries of the union are written first and read last; all others may be junk.
    slot_of = torch.empty((runs.count, used), dtype=torch.int64, device=position.device)
    slot_of[run, position] = -1
    held = state.slot_pos[runs.state]
    owner, slot = ((held >= 0) & (held < used)).nonzero(as_tuple=True)
    slot_of[owner, held[owner, slot].long()] = slot
    return slot_of[run, position]


def _check_hot_blocks(state: ResolverState, step: Step, runs: Runs, union: Union) -> None:
    """A capacity that the hot table does not cover would address blocks of other requests."""
    run = torch.unique_consecutive(union.run)
    size = step.geometry.block_size
    capacity = state.capacity[runs.state[run]]
    outside = ((capacity < 0) | (capacity > state.max_capacity)).nonzero()
    if outside.numel():
        bad = int(outside[0, 0])
        raise refusals.capacity_outside(
            int(runs.state[run[bad]]), int(capacity[bad]), state.max_capacity
        )
    needed = (capacity + size - 1) // size
    leased = (step.hot_table[runs.request[run]] > 0).cumprod(dim=1).sum(dim=1)
    short = (leased < needed).nonzero()
    if short.numel():
        bad = int(short[0, 0])
        at = int(runs.state[run[bad]])
        raise refusals.hot_blocks_missing(
            at,
            int(runs.request[run[bad]]),
            int(state.capacity[at]),
            int(needed[bad]),
            int(leased[bad]),
        )


def _plan(
    state: ResolverState, step: Step, runs: Runs, union: Union, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state; physical row (-1 when dropped) and miss flag of every union entry."""
    torch_sampling.sample(state, union.state, union.position, union.slot)
    hit = union.slot >= 0
    state.slot_stamp[union.state[hit], union.slot[hit]] = union.stamp[hit]
    state.step[union.state] = union.stamp
    per_run = torch.bincount(union.run, minlength=runs.count)
    counts[2] = torch.bincount(union.run[hit], minlength=runs.count)
    missing = per_run - counts[2]
    slot = union.slot.clone()
    miss = (~hit).nonzero().squeeze(1)
    if miss.numel():
        taken = torch.minimum(missing, state.capacity[runs.state] - counts[2])
        run = union.run[miss]
        rank = torch.arange(miss.numel(), device=miss.device) - (missing.cumsum(0) - missing)[run]
        kept = rank < taken[run]
        chosen = _choose_slots(state, runs, taken)
        loads = miss[kept]
        slot[loads] = chosen[run[kept], rank[kept]]
        filled = (union.state[loads], slot[loads])
        state.slot_pos[filled] = union.position[loads].to(torch.int32)
        state.slot_stamp[filled] = union.stamp[loads]
        counts[3] = taken
    rows = _hot_rows(step.geometry, step.hot_table, runs.request[union.run], slot)
    spill = (slot < 0).nonzero().squeeze(1)
    if spill.numel():
        rows[spill] = _scratch_rows(step.geometry, step.scratch_table, spill.numel(), rows)
        stored = rows[spill] >= 0
        counts[4] = torch.bincount(union.run[spill[stored]], minlength=runs.count)
        counts[5] = torch.bincount(union.run[spill[~stored]], minlength=runs.count)
    return rows, ~hit


def _choose_slots(state: ResolverState, runs: Runs, taken: torch.Tensor) -> torch.Tensor:
    """Slots to fill, ascending, int64 ``[U, max(taken)]``; entries beyond ``taken`` are junk."""
    most = int(taken.max())
    slots = torch.arange(state.max_capacity, device=taken.device)
    position = state.slot_pos[runs.state].long()
    stamp = state.slot_stamp[runs.state].long()
    # Empty slots sort first, lowest slot first; then the oldest stamp, lowest position.
    order = torch.where(position < 0, slots - state.max_capacity, (stamp << 32) | position)
    usable = slots < state.capacity[runs.state].unsqueeze(1)
    # The run's step was advanced before: what carries it was selected in this step.
    usable &= (position < 0) | (stamp < state.step[runs.state].unsqueeze(1))
    order = order.masked_fill_(~usable, _NOT_A_VICTIM)
    best = order.topk(most, dim=1, largest=False, sorted=True).indices
    columns = torch.arange(most, device=taken.device)
    best = best.masked_fill_(columns >= taken.unsqueeze(1), state.max_capacity)
    return best.sort(dim=1).values


def _hot_rows(
    geometry: Geometry, hot_table: torch.Tensor, request: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    if hot_table.shape[1] == 0:
        return torch.full_like(slot, -1)
    size = geometry.block_size
    index = slot.div(size, rounding_mode="floor")
    block = hot_table[request, index.clamp(min=0)].long()
    return torch.where(slot >= 0, block * size + (slot - index * size), -1)


def _scratch_rows(
    geometry: Geometry, scratch_table: torch.Tensor | None, wanted: int, like: torch.Tensor
) -> torch.Tensor:
    """Rows of the first ``wanted`` spills of the step, -1 where scratch has run out."""
    rows = torch.full((wanted,), -1, dtype=like.dtype, device=like.device)
    if scratch_table is not None and scratch_table.numel():
        size = geometry.block_size
        usable = int((scratch_table > 0).cumprod(0).sum()) * size
        index = torch.arange(min(wanted, usable), device=like.device)
        block = index.div(size, rounding_mode="floor")
        rows[: index.numel()] = scratch_table[block].long() * size + (index - block * size)
    return rows


def _write_swaps(
    runs: Runs, run: torch.Tensor, host: torch.Tensor, physical: torch.Tensor, out: Resolution
) -> None:
    """Pack each run's loads over the cells of its rows; entries come by run, ascending."""
    topk = out.topk
    total = torch.bincount(run, minlength=runs.count)
    index = torch.arange(run.numel(), device=run.device) - (total.cumsum(0) - total)[run]
    cell = runs.first_row[run] * topk + index
    out.swap_host.view(-1)[cell] = host
    out.swap_physical.view(-1)[cell] = physical
    live = runs.of_row < runs.count
    row_run = runs.of_row[live]
    row = live.nonzero().squeeze(1)
    before = (row - runs.first_row[row_run]) * topk
    out.swap_counts[row] = (total[row_run] - before).clamp(0, topk).to(torch.int32)
