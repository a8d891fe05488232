"""Changes of resolver state between steps: owner, capacity, rewritten rows.

Rare or small next to ``resolve``, so there is one implementation in torch operations that
works on the arrays of every backend and device. Not for use while a step is in flight.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.state import ResolverState


def reset(state: ResolverState, row: int, *, capacity: int = 0) -> None:
    """Empty a state row for a new owner; only its step survives.

    Raises ``IndexError`` on a row, ``ValueError`` on a capacity that does not exist.
    """
    state.check_row(row)
    _check_capacity(state, row, capacity)
    state.slot_pos[row].fill_(-1)
    state.slot_stamp[row].zero_()
    state.capacity[row] = capacity
    state.counters[row].zero_()
    _clear_samples(state, row)
    state.ghost_pos[row].fill_(-1)
    state.ghost[row].zero_()


def set_capacity(state: ResolverState, row: int, capacity: int) -> torch.Tensor:
    """Change the hot rows of a state row; returns slot moves int32 ``[M, 2]`` (from, to).

    Growing moves nothing. Shrinking keeps the most recently selected rows (stamp, then
    position); survivors beyond the new capacity move to free slots below it, both ascending.
    Carry the moves out with ``apply_moves`` on every layer of the group before the blocks
    beyond ``ceil(capacity / block_size)`` go back to the pool. Octiles start again: they are
    eighths of the old capacity. Raises as ``reset`` does.
    """
    state.check_row(row)
    _check_capacity(state, row, capacity)
    before = int(state.capacity[row])
    state.capacity[row] = capacity
    if capacity != before:
        _clear_samples(state, row)
    if capacity >= before:
        return torch.empty((0, 2), dtype=torch.int32, device=state.device)
    return _shrink(state, row, capacity)


def invalidate(state: ResolverState, rows: torch.Tensor, positions: torch.Tensor) -> None:
    """Forget hot copies of rewritten rows: pairs of state row and position, int32 or int64 [n].

    A state row of -1 skips its pair; positions outside the state are never held, so they are
    skipped too. Duplicates are fine.
    """
    if rows.shape != positions.shape or rows.dim() != 1:
        raise ValueError(
            "rows and positions must be 1-D and of one length, "
            f"got {tuple(rows.shape)} and {tuple(positions.shape)}"
        )
    known = (rows >= 0) & (positions >= 0) & (positions < state.max_positions)
    if not bool(known.any()):
        return
    span = state.max_positions
    owners = torch.unique(rows[known].long())
    wanted = torch.unique(rows[known].long() * span + positions[known])
    for held, emptied in (
        (state.slot_pos, {"slot_pos": -1, "slot_stamp": 0}),
        (state.ghost_pos, {"ghost_pos": -1}),
    ):
        position = held[owners].long()
        key = torch.where(position >= 0, owners.unsqueeze(1) * span + position, -1)
        nearest = torch.searchsorted(wanted, key).clamp_(max=wanted.numel() - 1)
        found = (wanted[nearest] == key).nonzero()
        for name, value in emptied.items():
            getattr(state, name)[owners[found[:, 0]], found[:, 1]] = value


def _check_capacity(state: ResolverState, row: int, capacity: int) -> None:
    if not 0 <= capacity <= state.max_capacity:
        raise ValueError(
            f"state row {row}: capacity must be 0 to {state.max_capacity} rows, got {capacity}"
        )


def _clear_samples(state: ResolverState, row: int) -> None:
    state.octile[row].zero_()
    state.octile_misses[row] = 0


def _shrink(state: ResolverState, row: int, capacity: int) -> torch.Tensor:
    slot_pos, slot_stamp = state.slot_pos[row], state.slot_stamp[row]
    held = (slot_pos >= 0).nonzero().squeeze(1)
    age = (slot_stamp[held].long() << 32) | slot_pos[held].long()
    order = held[age.argsort(descending=True)]
    kept, lost = order[:capacity], order[capacity:]
    slot_pos[lost] = -1
    slot_stamp[lost] = 0
    source = kept[kept >= capacity].sort().values
    target = (slot_pos[:capacity] < 0).nonzero().squeeze(1)[: source.numel()]
    slot_pos[target] = slot_pos[source]
    slot_stamp[target] = slot_stamp[source]
    slot_pos[source] = -1
    slot_stamp[source] = 0
    return torch.stack((source, target), dim=1).to(torch.int32)
