"""Shrinking many hot buffers of every index group at once, and the row moves that follow.

The rule is that of ``upkeep.set_capacity``: the most recently selected rows stay, those in slots
that go move to free slots that stay, both ascending. Reads back only how many moves there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsed.kernels.state_bank import StateBank

_ROWS_AT_ONCE = 4
"""Bounds the temporary memory: about 8 words per slot and group."""


@dataclass(frozen=True, eq=False)
class SlotMoves:
    """Slot moves of one index group: ``row[i]`` moves ``source[i]`` to ``target[i]``; int64 [M]."""

    row: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


def shrink(bank: StateBank, rows: torch.Tensor, capacities: torch.Tensor) -> tuple[SlotMoves, ...]:
    """Shrink state rows in every group; rows with at most their new capacity stay unchanged.

    ``rows`` int64 [n], distinct; ``capacities`` int32 [n], the same in all groups. Returns the
    moves of each group. Carry them out on every layer of the group before blocks beyond
    ``ceil(capacity / block_size)`` go back to the pool.
    """
    parts = [
        _shrink_some(bank, rows[start : start + _ROWS_AT_ONCE], capacities[start:][:_ROWS_AT_ONCE])
        for start in range(0, rows.shape[0], _ROWS_AT_ONCE)
    ]
    nothing = torch.empty(0, dtype=torch.int64, device=bank.device)
    moves = []
    for group in range(bank.groups):
        of_group = [[column[part[0] == group] for column in part[1:]] for part in parts]
        joined = [torch.cat(columns) for columns in zip(*of_group, strict=True)]
        moves.append(SlotMoves(*(joined or [nothing] * 3)))
    return tuple(moves)


def _shrink_some(
    bank: StateBank, rows: torch.Tensor, capacities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group, state row, source and target slot of each move, int64 [M]."""
    arrays = bank.arrays
    before = arrays["capacity"].index_select(1, rows)
    after = torch.minimum(before, capacities)
    changed = before != after
    positions = arrays["slot_pos"].index_select(1, rows)
    stamps = arrays["slot_stamp"].index_select(1, rows)
    slots = torch.arange(positions.shape[-1], device=bank.device).expand(positions.shape)
    limit = after.unsqueeze(-1)

    held = positions >= 0
    age = torch.where(held, (stamps.long() << 32) | positions.long(), -1)
    order = age.argsort(dim=-1, descending=True)
    rank = torch.empty_like(order).scatter_(-1, order, slots)
    kept = held & (rank < limit)
    stays = kept & (slots < limit)
    moves = kept & ~stays
    free = (slots < limit) & ~stays
    target = _nth_slot(free, slots).gather(-1, _rank(moves))

    arrays["slot_pos"].index_copy_(1, rows, _placed(positions, stays, moves, target, -1))
    arrays["slot_stamp"].index_copy_(1, rows, _placed(stamps, stays, moves, target, 0))
    arrays["capacity"].index_copy_(1, rows, after)
    for name in ("octile", "octile_misses"):
        counted = arrays[name].index_select(1, rows)
        keep = ~changed.unsqueeze(-1) if counted.dim() == 3 else ~changed
        arrays[name].index_copy_(1, rows, counted * keep)
    group, index, source = moves.nonzero(as_tuple=True)
    return group, rows[index], source, target[group, index, source]


def _rank(marked: torch.Tensor) -> torch.Tensor:
    """The number of marked slots below each marked one; the width for slots that are not."""
    return torch.where(marked, marked.long().cumsum(-1) - 1, marked.shape[-1])


def _nth_slot(marked: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The marked slots, ascending, in ``[..., B + 1]``; the last column means nothing."""
    found = slots.new_zeros((*slots.shape[:-1], slots.shape[-1] + 1))
    return found.scatter_(-1, _rank(marked), slots)


def _placed(
    values: torch.Tensor, stays: torch.Tensor, moves: torch.Tensor, target: torch.Tensor, empty: int
) -> torch.Tensor:
    """Slot values after the moves; all else is ``empty``."""
    width = values.shape[-1]
    placed = values.new_full((*values.shape[:-1], width + 1), empty)
    placed[..., :width] = torch.where(stays, values, empty)
    placed.scatter_(-1, torch.where(moves, target, width), values)
    return placed[..., :width]
