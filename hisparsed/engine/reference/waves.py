"""Which requests of a step share the scratch blocks at the same time.

Decided from leases and row counts alone, before anything is resolved: a GPU node can plan a step
without reading back from the device. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Decode rows ``[start, stop)`` of a step, whole requests."""

    start: int
    stop: int


def most_spills(*, rows: int, context: int, topk: int, capacity: int) -> int:
    """Rows of one request that may not fit its hot buffer of ``capacity`` rows.

    ``rows`` decode rows select at most ``rows * topk`` tokens, and no more than ``context``.
    Without a hot buffer there is nothing on the host only, so nothing spills.
    """
    if capacity == 0:
        return 0
    return max(0, min(rows * topk, context) - capacity)


def plan_waves(rows: Sequence[int], spills: Sequence[int], scratch_rows: int) -> tuple[Wave, ...]:
    """Consecutive requests in as few waves as their spills allow.

    ``rows`` and ``spills`` of each request, in the order of the step. A request whose spills
    exceed ``scratch_rows`` gets a wave of its own.
    """
    waves: list[Wave] = []
    start = stop = used = 0
    for count, needed in zip(rows, spills, strict=True):
        if used + needed > scratch_rows and stop > start:
            waves.append(Wave(start, stop))
            start, used = stop, 0
        stop += count
        used += needed
    if stop > start:
        waves.append(Wave(start, stop))
    return tuple(waves)
