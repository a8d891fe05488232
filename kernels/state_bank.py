"""The states of all index groups of a node in one allocation, kept up without reading back.

``upkeep`` changes one row of one state and may ask the device; here many rows of every state
change in a few operations of fixed shape, so a GPU node can do it before each step. Same rules,
same integers. Shrinking, which is rare, is in ``bank_shrink``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsed.kernels.ghosts import ghost_positions
from hisparsed.kernels.state import COUNTERS, ResolverState

_PER_ROW = (
    "slot_pos",
    "slot_stamp",
    "pos_slot",
    "capacity",
    "step",
    "counters",
    "octile",
    "octile_misses",
    "ghost_stamp",
    "ghost",
)


@dataclass(frozen=True, eq=False)
class StateBank:
    """``states[g]`` shares memory with row ``g`` of every array of ``arrays``. See ``create``.

    Arrays are those of ``ResolverState`` with two dimensions in front: group and state row. The
    last state row belongs to nobody: what has no place is written there.
    """

    states: tuple[ResolverState, ...]
    arrays: dict[str, torch.Tensor]
    retired: torch.Tensor
    """int64 [G, 6]: counters of owners that have gone, so that totals never go back."""

    @classmethod
    def create(
        cls,
        groups: int,
        num_states: int,
        max_capacity: int,
        max_positions: int,
        *,
        sample_period: int = 16,
        ghost_every: int = 64,
        device: torch.device | str = "cpu",
    ) -> StateBank:
        """All rows empty, with capacity 0. Raises ``ValueError`` as ``ResolverState`` does."""
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        pattern = ResolverState.create(
            1,
            max_capacity,
            max_positions,
            sample_period=sample_period,
            ghost_every=ghost_every,
            device=device,
        )
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, got {num_states}")
        arrays = {
            name: getattr(pattern, name).expand(groups, num_states + 1, *shape).contiguous()
            for name in _PER_ROW
            for shape in (getattr(pattern, name).shape[1:],)
        }
        states = tuple(
            ResolverState(
                max_capacity=max_capacity,
                max_positions=max_positions,
                sample_period=sample_period,
                ghost_every=ghost_every,
                **{name: array[group, :num_states] for name, array in arrays.items()},
            )
            for group in range(groups)
        )
        retired = torch.zeros((groups, len(COUNTERS)), dtype=torch.int64, device=device)
        return cls(states, arrays, retired)

    @property
    def groups(self) -> int:
        return len(self.states)

    @property
    def num_states(self) -> int:
        return self.states[0].num_states

    @property
    def device(self) -> torch.device:
        return self.retired.device

    def begin(self, rows: torch.Tensor, capacities: torch.Tensor) -> None:
        """Give state rows to new owners: empty but for their step, which only grows.

        ``rows`` int64 [n], distinct; ``capacities`` int32 [G, n].
        """
        self.retired.add_(self.arrays["counters"][:, rows].sum(dim=1))
        for name in ("slot_pos", "pos_slot"):
            self.arrays[name].index_fill_(1, rows, -1)
        for name in ("slot_stamp", "counters", "ghost_stamp", "ghost"):
            self.arrays[name].index_fill_(1, rows, 0)
        self._clear_samples(rows)
        self.arrays["capacity"].index_copy_(1, rows, capacities)

    def grow(self, rows: torch.Tensor, capacities: torch.Tensor) -> None:
        """Set capacities of at least what the rows have; shapes as ``begin``.

        Octiles start anew where a capacity changes.
        """
        before = self.arrays["capacity"].index_select(1, rows)
        same = before == capacities
        for name in ("octile", "octile_misses"):
            counted = self.arrays[name].index_select(1, rows)
            keep = same.unsqueeze(-1) if counted.dim() == 3 else same
            self.arrays[name].index_copy_(1, rows, counted * keep)
        self.arrays["capacity"].index_copy_(1, rows, capacities)

    def forget(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Forget hot copies of rewritten rows in every group: pairs of state row and position.

        Both int64 [n]. A state row or position below 0 skips its pair, and so does a position
        that no state holds.
        """
        nobody = self.num_states
        known = (rows >= 0) & (positions >= 0) & (positions < self.states[0].max_positions)
        row = torch.where(known, rows, nobody)
        position = torch.where(known, positions, 0)
        slots = self.arrays["pos_slot"][:, row, position].long()
        held = (slots >= 0) & known
        group = torch.arange(self.groups, device=self.device).unsqueeze(1).expand_as(slots)
        at = (group, torch.where(held, row, nobody), torch.where(held, slots, 0))
        self.arrays["slot_pos"].index_put_(at, self._word("slot_pos", -1))
        self.arrays["slot_stamp"].index_put_(at, self._word("slot_stamp", 0))
        self.arrays["pos_slot"].index_put_(
            (group, row.expand_as(slots), position.expand_as(slots)), self._word("pos_slot", -1)
        )
        every = self.states[0].ghost_every
        sample = position // every
        sampled = known & (ghost_positions(sample, every) == position)
        owner = torch.where(sampled, row, nobody).expand_as(slots)
        self.arrays["ghost_stamp"].index_put_(
            (group, owner, sample.expand_as(slots)), self._word("ghost_stamp", 0)
        )

    def forget_all(self) -> None:
        """Drop every hot copy; owners, capacities, steps and counters stay."""
        self.arrays["slot_pos"].fill_(-1)
        self.arrays["pos_slot"].fill_(-1)
        self.arrays["slot_stamp"].zero_()

    def _clear_samples(self, rows: torch.Tensor) -> None:
        for name in ("octile", "octile_misses"):
            self.arrays[name].index_fill_(1, rows, 0)

    def _word(self, name: str, value: int) -> torch.Tensor:
        return self.arrays[name].new_full((), value)


def state_bytes(
    groups: int, num_states: int, max_capacity: int, max_positions: int, *, ghost_every: int = 64
) -> int:
    """Device memory of a bank and of the Triton backend's workspace for its steps."""
    words = -(-max_positions // 32)
    ghosts = -(-max_positions // ghost_every)
    bank = 8 * max_capacity + 2 * max_positions + 4 * ghosts + 8 * (8 + 6 + 17 + 1) + 8
    workspace = 5 * max_capacity + 12 * words + 4 * ghosts + 28
    return groups * ((num_states + 1) * bank + num_states * workspace)
