"""What a worker answers about hot buffers: plain numbers that cross vLLM's worker call.

Computed on the CPU from a picture of the counters; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hisparsed.engine.cuda.residency.snapshot import Taken
from hisparsed.engine.request_curves import MAX_REQUESTS, request_curves
from hisparsed.kernels.api import COUNTERS, pooled_miss_curve


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
