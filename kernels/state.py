"""What the resolver remembers between steps: one struct of arrays that every backend shares.

All arrays are allocated once, on one device. Nothing here decides anything: ``resolve`` and
``upkeep`` write these arrays, ``curve`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_CAPACITY = 32704
"""Hot rows of one request: slots are int16, and a hot buffer is whole blocks of 64."""

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
    248 days at 100 steps a second.
    """

    max_capacity: int
    max_positions: int
    sample_period: int
    """Octiles and ghosts are counted on steps that are multiples of this."""
    ghost_every: int
    """One position in this many is a ghost sample; a power of two."""
    slot_pos: torch.Tensor
    """int32 [S, B]: position held by a slot, -1 empty."""
    slot_stamp: torch.Tensor
    """int32 [S, B]: step of last selection, 0 empty."""
    pos_slot: torch.Tensor
    """int16 [S, P]: slot that holds a position, -1 none."""
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
    ghost_stamp: torch.Tensor
    """int32 [S, ceil(P / ghost_every)]: last selection of each sampled position, 0 never."""
    ghost: torch.Tensor
    """int64 [S, 17]: sampled references by estimated depth in sixteenths of ``max_capacity``;
    the last bin is deeper or never seen."""

    def __post_init__(self) -> None:
        states = self.capacity.shape[0]
        for name, (dtype, *columns) in self._layout().items():
            array, shape = getattr(self, name), (states, *columns)
            if array.dtype != dtype or array.shape != shape or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} of shape {shape}, got {array.dtype} of "
                    f"shape {tuple(array.shape)} and strides {array.stride()}"
                )

    def _layout(self) -> dict[str, tuple[Any, ...]]:
        """Dtype and what follows the state rows of each array's shape."""
        return {
            "slot_pos": (torch.int32, self.max_capacity),
            "slot_stamp": (torch.int32, self.max_capacity),
            "pos_slot": (torch.int16, self.max_positions),
            "capacity": (torch.int32,),
            "step": (torch.int32,),
            "counters": (torch.int64, len(COUNTERS)),
            "octile": (torch.int64, OCTILES),
            "octile_misses": (torch.int64,),
            "ghost_stamp": (torch.int32, -(-self.max_positions // self.ghost_every)),
            "ghost": (torch.int64, GHOST_BINS + 1),
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
                f"max_capacity must be 1 to {MAX_CAPACITY} rows (slots are int16), "
                f"got {max_capacity}"
            )
        if sample_period < 1:
            raise ValueError(f"sample_period must be at least 1 step, got {sample_period}")
        if ghost_every < 1 or ghost_every & (ghost_every - 1):
            raise ValueError(f"ghost_every must be a power of two, got {ghost_every}")
        ghosts = -(-max_positions // ghost_every)

        def filled(value: int, dtype: torch.dtype, *columns: int) -> torch.Tensor:
            return torch.full((num_states, *columns), value, dtype=dtype, device=device)

        return cls(
            max_capacity=max_capacity,
            max_positions=max_positions,
            sample_period=sample_period,
            ghost_every=ghost_every,
            slot_pos=filled(-1, torch.int32, max_capacity),
            slot_stamp=filled(0, torch.int32, max_capacity),
            pos_slot=filled(-1, torch.int16, max_positions),
            capacity=filled(0, torch.int32),
            step=filled(0, torch.int32),
            counters=filled(0, torch.int64, len(COUNTERS)),
            octile=filled(0, torch.int64, OCTILES),
            octile_misses=filled(0, torch.int64),
            ghost_stamp=filled(0, torch.int32, ghosts),
            ghost=filled(0, torch.int64, GHOST_BINS + 1),
        )

    @property
    def num_states(self) -> int:
        return self.capacity.shape[0]

    @property
    def device(self) -> torch.device:
        return self.capacity.device

    def check_row(self, row: int) -> None:
        """Raise ``IndexError`` unless ``row`` is a state row."""
        if not 0 <= row < self.num_states:
            raise IndexError(f"state row {row} does not exist: rows are 0 to {self.num_states - 1}")
