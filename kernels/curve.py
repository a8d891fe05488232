"""The miss curve of one state row: what a smaller or a larger hot buffer would miss.

Below the current capacity it is exact (octiles); above it is an estimate (ghosts). Reads
counters only, decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    capacity = int(state.capacity[row])
    octiles: list[int] = state.octile[row].tolist()
    misses = int(state.octile_misses[row])
    samples = misses + sum(octiles)
    if capacity == 0 or samples == 0:
        return None
    points: dict[int, float] = {}
    hits = 0
    for eighth, found in enumerate(octiles, start=1):
        hits += found
        points[-(-capacity * eighth // OCTILES)] = 1 - hits / samples
    now = 1 - hits / samples
    points.update(_above(state, row, capacity, now))
    return MissCurve(tuple(points), tuple(points.values()), capacity, samples)


def _above(state: ResolverState, row: int, capacity: int, now: float) -> dict[int, float]:
    """Estimates beyond the capacity: the exact ratio, scaled by what the ghosts say."""
    bins: list[int] = state.ghost[row].tolist()

    def deeper(first_bin: float) -> float:
        whole = int(first_bin)
        rest = sum(bins[whole:])
        return rest - (first_bin - whole) * bins[whole]

    here = deeper(capacity * GHOST_BINS / state.max_capacity)
    if here <= 0:
        return {}
    edges = {-(-state.max_capacity * edge // GHOST_BINS): edge for edge in range(1, GHOST_BINS + 1)}
    return {rows: now * deeper(edge) / here for rows, edge in edges.items() if rows > capacity}
