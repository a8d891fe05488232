"""Figures of a worker's hot buffers, without waiting for the device.

A copy of the counters begins on request, and is read on the next request; its host memory is
allocated once. The figures are computed from that copy on the CPU. They are plain numbers that
cross vLLM's worker call; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hisparsed.engine.worker_report import MAX_REQUESTS, request_curves
from hisparsed.kernels.api import (
    COUNTERS,
    ResolverState,
    StateBank,
    error_from,
    error_words,
    pooled_miss_curve,
)

_NAMES = ("capacity", "step", "counters", "octile", "octile_misses", "ghost")


class Taken:
    """One picture, on the CPU. ``states`` have the arrays that are counted, no others."""

    def __init__(
        self,
        states: tuple[ResolverState, ...],
        retired: torch.Tensor,
        begun: torch.Tensor,
        held: torch.Tensor,
        errors: torch.Tensor,
    ) -> None:
        self.states = states
        self.retired = retired
        self.begun = begun
        self.held = held
        self.error = error_from(errors.tolist())
        """What the kernels refused since the engine began; ``None`` when nothing."""


class Snapshots:
    """``begun`` int64 [G, S + 1, 2] is copied along."""

    def __init__(self, bank: StateBank, begun: torch.Tensor) -> None:
        self._bank = bank
        on_gpu = bank.device.type == "cuda"
        self._errors = error_words(bank.device)
        self._sources = {
            **{name: bank.arrays[name] for name in _NAMES},
            "retired": bank.retired,
            "begun": begun,
            "errors": self._errors,
        }
        self._held = torch.zeros(
            (bank.groups, bank.num_states + 1), dtype=torch.int64, device=bank.device
        )
        self._sources["held"] = self._held
        self._copies = {
            name: torch.zeros(source.shape, dtype=source.dtype, pin_memory=on_gpu)
            for name, source in self._sources.items()
        }
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._begun_copy = False

    def take(self) -> Taken | None:
        """The copy that was begun last, once it is complete; begins the next one then."""
        if self._event is not None and self._begun_copy and not self._event.query():
            return None
        taken = self._read() if self._begun_copy else None
        torch.sum(self._bank.arrays["slot_pos"] >= 0, dim=2, out=self._held)
        for name, source in self._sources.items():
            self._copies[name].copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._begun_copy = True
        return taken

    def _read(self) -> Taken:
        found = {name: copy.clone() for name, copy in self._copies.items()}
        rows = self._bank.num_states
        states = []
        for group, state in enumerate(self._bank.states):
            counted: dict[str, Any] = {name: found[name][group, :rows] for name in _NAMES}
            states.append(replace(state, **counted))
        return Taken(
            tuple(states), found["retired"], found["begun"], found["held"], found["errors"]
        )


def figures(taken: Taken, row_of: Mapping[str, int], row_bytes: Sequence[int]) -> dict[str, Any]:
    """Keys as in ``WorkerReport``, and ``rows``: by request the fields of ``HotRows``.

    ``row_of``: state row of each request; ``row_bytes``: of one row over the layers of a group.
    """
    totals = taken.retired.clone()
    for group, state in enumerate(taken.states):
        totals[group] += state.counters.sum(dim=0)
    counters = dict(zip(COUNTERS, totals.sum(dim=0).tolist(), strict=True))
    moved = totals[:, COUNTERS.index("loads")] + totals[:, COUNTERS.index("spills")]
    counters["h2d_bytes"] = sum(
        rows * size for rows, size in zip(moved.tolist(), row_bytes, strict=True)
    )
    curve = pooled_miss_curve(taken.states)
    points = zip(curve.capacities, curve.miss_ratios, strict=True) if curve is not None else ()
    capacity = taken.states[0].capacity.tolist()
    leased = sorted(
        ((name, row) for name, row in row_of.items() if capacity[row]),
        key=lambda one: -capacity[one[1]],
    )[:MAX_REQUESTS]
    begun = taken.begun.tolist()
    return {
        "counters": counters,
        "miss_curve": tuple(points),
        "request_curves": request_curves(
            taken.states, leased, lambda group, row: tuple(begun[group][row])
        )
        if leased
        else {},
        "rows": _rows(taken, row_of),
    }


def _rows(taken: Taken, row_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    counted = torch.stack([state.counters for state in taken.states]).sum(dim=0)
    capacity = torch.stack([state.capacity for state in taken.states]).sum(dim=0)
    held = taken.held.sum(dim=0)
    return {
        name: (int(capacity[row]), int(held[row]), *counted[row, :4].tolist())
        for name, row in row_of.items()
    }
