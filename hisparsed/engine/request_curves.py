"""Each request's own miss curve, in rows a step, from what the resolver counted.

Shared by the nodes whose workers run our resolver. Reads counters, decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hisparsed.engine.worker_report import RowCurve
from hisparsed.kernels.api import COUNTERS, ResolverState, request_miss_curves

MAX_REQUESTS = 256
LEAST_STEPS = 8
"""Sampled steps behind a curve; fewer say little, and a change of size begins anew."""
DISTINCT = [COUNTERS.index(name) for name in ("hits", "loads", "spills", "dropped")]
"""Columns of the counters that count distinct host-backed rows."""


def request_curves(
    states: Sequence[ResolverState],
    row_of: Sequence[tuple[str, int]],
    begun: Callable[[int, int], tuple[int, int]],
) -> dict[str, RowCurve]:
    """(hot rows of one group, rows loaded a step over all groups) by request.

    ``states``: one an index group. ``row_of``: requests and their state rows. ``begun(group,
    row)``: step and distinct rows when the request began there or its size last changed.
    Requests without enough sampled steps are left out.
    """
    distinct = [state.counters[:, DISTINCT].sum(dim=1).tolist() for state in states]
    steps = [state.step.tolist() for state in states]
    curves: dict[str, RowCurve] = {}
    found = request_miss_curves(states, [row for _, row in row_of])
    for (name, row), curve in zip(row_of, found, strict=True):
        rows_a_step = 0.0
        for group, (selected, step) in enumerate(zip(distinct, steps, strict=True)):
            first_step, before = begun(group, row)
            if step[row] > first_step:
                rows_a_step += (selected[row] - before) / (step[row] - first_step)
        if curve is None or curve.samples < LEAST_STEPS * rows_a_step:
            continue
        curves[name] = tuple(
            (capacity, ratio * rows_a_step)
            for capacity, ratio in zip(curve.capacities, curve.miss_ratios, strict=True)
        )
    return curves
