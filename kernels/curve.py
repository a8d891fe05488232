"""The miss curve of one state row: the misses of a smaller or a larger hot buffer.

Below the current capacity it is exact (octiles); above it is an estimate (ghosts). Reads
counters only, decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparsed.kernels.state import GHOST_BINS, OCTILES, ResolverState


@dataclass(frozen=True)
class MissCurve:
    """Miss ratios (misses / distinct host-backed rows of a step) by capacity in rows.

    ``capacities`` ascend. Ratios up to ``exact_to`` (the current capacity) are exact for
    capacities that hold the union of one step; those above are estimates.
    """

    capacities: tuple[int, ...]
    miss_ratios: tuple[float, ...]
    exact_to: int
    samples: int
    """Distinct host-backed rows behind the exact part."""


def miss_ratio_curve(state: ResolverState, row: int) -> MissCurve | None:
    """The curve of a state row since its capacity was set; None before the first sample.

    Raises ``IndexError`` for a row that does not exist. Copies a few words from the device.
    """
    state.check_row(row)
    return _curve(
        int(state.capacity[row]),
        state.octile[row].tolist(),
        int(state.octile_misses[row]),
        state.ghost[row].tolist(),
        state.max_capacity,
    )


def pooled_miss_curve(states: Sequence[ResolverState]) -> MissCurve | None:
    """One curve of all rows of ``states`` that have the capacity most samples were taken at.

    It is the expectation for the next request. The states share ``max_capacity``; ``None`` before
    the first sample. Copies a few words per row from the device.
    """
    samples: Counter[int] = Counter()
    for state in states:
        taken = state.octile.sum(dim=1) + state.octile_misses
        for capacity, count in zip(state.capacity.tolist(), taken.tolist(), strict=True):
            samples[capacity] += count
    if not samples:
        return None
    capacity, _ = samples.most_common(1)[0]
    octiles = torch.zeros(OCTILES, dtype=torch.int64)
    ghosts = torch.zeros(GHOST_BINS + 1, dtype=torch.int64)
    misses = 0
    for state in states:
        rows = state.capacity == capacity
        octiles += state.octile[rows].sum(dim=0).cpu()
        ghosts += state.ghost[rows].sum(dim=0).cpu()
        misses += int(state.octile_misses[rows].sum())
    return _curve(capacity, octiles.tolist(), misses, ghosts.tolist(), states[0].max_capacity)


def request_miss_curves(
    states: Sequence[ResolverState], rows: Sequence[int]
) -> list[MissCurve | None]:
    """A curve for each of ``rows``, pooled over ``states`` (the index groups of one engine).

    Each as ``miss_ratio_curve`` says, weighted by what each group selected; ``None`` also where the
    groups' capacities differ. Copies a few words per row from the device.
    """
    capacities = [state.capacity.tolist() for state in states]
    octiles = torch.stack([state.octile for state in states]).sum(dim=0).tolist()
    misses = torch.stack([state.octile_misses for state in states]).sum(dim=0).tolist()
    ghosts = torch.stack([state.ghost for state in states]).sum(dim=0).tolist()
    most = states[0].max_capacity
    curves: list[MissCurve | None] = []
    for row in rows:
        states[0].check_row(row)
        held = {of_group[row] for of_group in capacities}
        one = held.pop()
        curves.append(None if held else _curve(one, octiles[row], misses[row], ghosts[row], most))
    return curves


def _curve(
    capacity: int, octiles: list[int], misses: int, ghosts: list[int], max_capacity: int
) -> MissCurve | None:
    samples = misses + sum(octiles)
    if capacity == 0 or samples == 0:
        return None
    points: dict[int, float] = {}
    hits = 0
    for eighth, found in enumerate(octiles, start=1):
        hits += found
        points[-(-capacity * eighth // OCTILES)] = 1 - hits / samples
    now = 1 - hits / samples
    points.update(_above(ghosts, max_capacity, capacity, now))
    return MissCurve(tuple(points), tuple(points.values()), capacity, samples)


def _above(bins: list[int], max_capacity: int, capacity: int, now: float) -> dict[int, float]:
    """Estimates beyond the capacity: the exact ratio, scaled by the ghosts."""

    def deeper(first_bin: float) -> float:
        whole = int(first_bin)
        rest = sum(bins[whole:])
        return rest - (first_bin - whole) * bins[whole]

    here = deeper(capacity * GHOST_BINS / max_capacity)
    if here <= 0:
        return {}
    edges = {-(-max_capacity * edge // GHOST_BINS): edge for edge in range(1, GHOST_BINS + 1)}
    return {rows: now * deeper(edge) / here for rows, edge in edges.items() if rows > capacity}
