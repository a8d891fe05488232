"""The resolver's state between steps: one struct of arrays that every backend shares.

All arrays are allocated once, on one device. Nothing here decides anything: ``resolve`` and
``upkeep`` write these arrays, ``curve`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_CAPACITY = 32704
"""Hot rows of one request: slots fit 15 bits, and a hot buffer is whole blocks of 64."""

COUNTERS = ("references", "resident", "hits", "loads", "spills", "dropped")
"""Columns of ``ResolverState.counters``."""

OCTILES = 8
GHOST_BINS = 16
"""Bins of the ghost histogram up to ``max_capacity``; one more counts everything deeper."""


@dataclass(frozen=True, eq=False)
class ResolverState:
    """Residency state of one index group for ``S`` state rows. Build with ``create``.

    An empty slot has position -1 and stamp 0; held slots have stamps of 1 and more. Slots at or
    beyond a row's capacity are empty. ``step`` only grows: 2**31 steps of one state row are
    248 days at 100 steps per second.

    Eight bytes per slot, whatever ``max_positions`` is: each step finds the slot of a position by
    comparing all slots with the positions that the step selects.
    """

    max_capacity: int
    max_positions: int
    sample_period: int
    """Octiles and ghosts are counted where this divides ``clock``."""
    ghost_every: int
    """One position in this many is a ghost sample; a power of two."""
    slot_pos: torch.Tensor
    """int32 [S, B]: position held by a slot, -1 empty."""
    slot_stamp: torch.Tensor
    """int32 [S, B]: step of last selection, 0 empty."""
    capacity: torch.Tensor
    """int32 [S]: hot rows in use by this row; change with ``set_capacity``."""
    step: torch.Tensor
    """int32 [S]: steps with host-backed references; survives ``reset``."""
    counters: torch.Tensor
    """int64 [S, 6]: see ``COUNTERS``. References are counted one by one, hits to dropped are
    distinct rows of a step."""
    octile: torch.Tensor
    """int64 [S, 8]: hits of sampled steps by stack depth, in eighths of the capacity."""
    octile_misses: torch.Tensor
    """int64 [S]: distinct misses of the same sampled steps."""
    ghost_pos: torch.Tensor
    """int32 [S, ceil(B / ghost_every)]: sampled positions, the last selected first (of one step,
    the highest first), -1 none. Everything deeper than ``max_capacity`` rows has one bin, so it
    need not be kept."""
    ghost: torch.Tensor
    """int64 [S, 17]: sampled references by estimated depth in sixteenths of ``max_capacity``;
    the last bin is deeper or never seen."""
    clock: torch.Tensor
    """int32 [1]: steps begun with ``begin_step``. All rows of a step are sampled or none, in every
    call of the step; without ``begin_step`` every step is sampled."""

    def __post_init__(self) -> None:
        states = self.capacity.shape[0]
        for name, (dtype, *columns) in self._layout().items():
            array = getattr(self, name)
            shape = (1,) if name == "clock" else (states, *columns)
            if array.dtype != dtype or array.shape != shape or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} of shape {shape}, got {array.dtype} of "
                    f"shape {tuple(array.shape)} and strides {array.stride()}"
                )

    def _layout(self) -> dict[str, tuple[Any, ...]]:
        """Dtype and the dimensions after the state rows of each array."""
        return {
            "slot_pos": (torch.int32, self.max_capacity),
            "slot_stamp": (torch.int32, self.max_capacity),
            "capacity": (torch.int32,),
            "step": (torch.int32,),
            "counters": (torch.int64, len(COUNTERS)),
            "octile": (torch.int64, OCTILES),
            "octile_misses": (torch.int64,),
            "ghost_pos": (torch.int32, -(-self.max_capacity // self.ghost_every)),
            "ghost": (torch.int64, GHOST_BINS + 1),
            "clock": (torch.int32,),
        }

    @classmethod
    def create(
        cls,
        num_states: int,
        max_capacity: int,
        max_positions: int,
        *,
        sample_period: int = 16,
        ghost_every: int = 64,
        device: torch.device | str = "cpu",
    ) -> ResolverState:
        """All rows empty, with capacity 0. Raises ``ValueError`` on sizes out of range."""
        if num_states < 1 or max_positions < 1:
            raise ValueError(
                "num_states and max_positions must be at least 1, "
                f"got {num_states} and {max_positions}"
            )
        if not 1 <= max_capacity <= MAX_CAPACITY:
            raise ValueError(
                f"max_capacity must be 1 to {MAX_CAPACITY} rows (slots fit 15 bits), "
                f"got {max_capacity}"
            )
        if sample_period < 1:
            raise ValueError(f"sample_period must be at least 1 step, got {sample_period}")
        if ghost_every < 1 or ghost_every & (ghost_every - 1):
            raise ValueError(f"ghost_every must be a power of two, got {ghost_every}")

        def filled(value: int, dtype: torch.dtype, *columns: int) -> torch.Tensor:
            return torch.full((num_states, *columns), value, dtype=dtype, device=device)

        return cls(
            max_capacity=max_capacity,
            max_positions=max_positions,
            sample_period=sample_period,
            ghost_every=ghost_every,
            slot_pos=filled(-1, torch.int32, max_capacity),
            slot_stamp=filled(0, torch.int32, max_capacity),
            capacity=filled(0, torch.int32),
            step=filled(0, torch.int32),
            counters=filled(0, torch.int64, len(COUNTERS)),
            octile=filled(0, torch.int64, OCTILES),
            octile_misses=filled(0, torch.int64),
            ghost_pos=filled(-1, torch.int32, -(-max_capacity // ghost_every)),
            ghost=filled(0, torch.int64, GHOST_BINS + 1),
            clock=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def num_states(self) -> int:
        return self.capacity.shape[0]

    @property
    def device(self) -> torch.device:
        return self.capacity.device

    def begin_step(self) -> None:
        """Count one step, whatever the number of calls that resolve it."""
        self.clock.add_(1)

    def check_row(self, row: int) -> None:
        """Raise ``IndexError`` unless ``row`` is a state row."""
        if not 0 <= row < self.num_states:
            raise IndexError(f"state row {row} does not exist: rows are 0 to {self.num_states - 1}")
