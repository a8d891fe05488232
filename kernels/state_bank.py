"""The states of all index groups of a node in one allocation, kept up without reading back.

``upkeep`` changes one row of one state and may ask the device; here many rows of every state
change in a few operations of fixed shape, so a GPU node can do it before each step. Same rules,
same integers. Shrinking, which is rare, is in ``bank_shrink``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparsed.kernels.geometry import INT32_MAX
from hisparsed.kernels.state import COUNTERS, ResolverState

_PER_ROW = (
    "slot_pos",
    "slot_stamp",
    "capacity",
    "step",
    "counters",
    "octile",
    "octile_misses",
    "ghost_pos",
    "ghost",
)


@dataclass(frozen=True, eq=False)
class StateBank:
    """``states[g]`` shares memory with row ``g`` of every array of ``arrays``. See ``create``.

    Arrays are those of ``ResolverState`` with two dimensions in front: group and state row. The
    last state row has no owner: values without a place are written there.
    """

    states: tuple[ResolverState, ...]
    arrays: dict[str, torch.Tensor]
    retired: torch.Tensor
    """int64 [G, 6]: counters of former owners, so that totals never decrease."""
    clock: torch.Tensor
    """int32 [1]: the clock of every state."""

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
                clock=pattern.clock,
                **{name: array[group, :num_states] for name, array in arrays.items()},
            )
            for group in range(groups)
        )
        retired = torch.zeros((groups, len(COUNTERS)), dtype=torch.int64, device=device)
        return cls(states, arrays, retired, pattern.clock)

    @property
    def groups(self) -> int:
        return len(self.states)

    @property
    def num_states(self) -> int:
        return self.states[0].num_states

    @property
    def device(self) -> torch.device:
        return self.retired.device

    def begin_step(self) -> None:
        """Count one step of all groups, whatever the number of calls that resolve it."""
        self.clock.add_(1)

    def begin(self, rows: torch.Tensor, capacities: torch.Tensor) -> None:
        """Give state rows to new owners: empty but for their step, which only grows.

        ``rows`` int64 [n], distinct; ``capacities`` int32 [G, n].
        """
        self.retired.add_(self.arrays["counters"][:, rows].sum(dim=1))
        for name in ("slot_pos", "ghost_pos"):
            self.arrays[name].index_fill_(1, rows, -1)
        for name in ("slot_stamp", "counters", "ghost"):
            self.arrays[name].index_fill_(1, rows, 0)
        self._clear_samples(rows)
        self.arrays["capacity"].index_copy_(1, rows, capacities)

    def grow(self, rows: torch.Tensor, capacities: torch.Tensor) -> None:
        """Set capacities of at least what the rows have; shapes as ``begin``.

        Octiles start again where a capacity changes.
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

        Both int64 [n]. Tokens are written one after the other, so a state row forgets all from
        its lowest to its highest position. A state row or position below 0 skips its pair.
        """
        nobody = self.num_states
        known = (rows >= 0) & (positions >= 0)
        row = torch.where(known, rows, nobody)
        first = torch.full((nobody + 1,), INT32_MAX, dtype=torch.int64, device=self.device)
        last = torch.full_like(first, -1)
        first.scatter_reduce_(0, row, torch.where(known, positions, INT32_MAX), "amin")
        last.scatter_reduce_(0, row, torch.where(known, positions, -1), "amax")
        first, last = (edge.int().view(1, -1, 1) for edge in (first, last))
        slots, ghosts = self.arrays["slot_pos"], self.arrays["ghost_pos"]
        # No empty value is between the two: positions are 0 or more.
        rewritten = (slots >= first) & (slots <= last)
        slots.masked_fill_(rewritten, -1)
        self.arrays["slot_stamp"].masked_fill_(rewritten, 0)
        ghosts.masked_fill_((ghosts >= first) & (ghosts <= last), -1)

    def forget_all(self) -> None:
        """Drop every hot copy; owners, capacities, steps and counters stay."""
        self.arrays["slot_pos"].fill_(-1)
        self.arrays["slot_stamp"].zero_()

    def _clear_samples(self, rows: torch.Tensor) -> None:
        for name in ("octile", "octile_misses"):
            self.arrays[name].index_fill_(1, rows, 0)


def state_bytes(
    groups: int,
    num_states: int,
    max_capacity: int,
    max_positions: int,
    *,
    rows: int,
    topk: int,
    ghost_every: int = 64,
) -> tuple[int, int]:
    """Device memory of a bank, and of the Triton backend's workspace for steps of ``rows`` rows.

    Only the second grows with ``max_positions``, by one bit and one count per position and state
    row.
    """
    ghosts = -(-max_capacity // ghost_every)
    row = 8 * max_capacity + 4 * ghosts + 8 * (8 + 6 + 17 + 1) + 8
    words = -(-max_positions // 512) * 16
    by_state = 4 * (2 * words + 2 * max_capacity + ghosts)
    workspace = num_states * by_state + 4 * (3 * rows * topk + 6 * max(rows, 1024))
    return groups * (num_states + 1) * row, workspace
