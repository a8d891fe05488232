"""The counts of a node's workers about hot buffers: totals, rows of each request, its miss curve.

Filled by the executors and read on the engine thread. Counters are cumulative; rows are KV rows
over all index groups. ``request_curves`` is for nodes whose workers run our resolver: it reads the
resolver's counters and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hisparsed.kernels.api import COUNTERS, ResolverState, request_miss_curves

NO_COUNTERS = {
    "references": 0,
    "resident": 0,
    "hits": 0,
    "loads": 0,
    "spills": 0,
    "dropped": 0,
    "h2d_bytes": 0,
}

RowCurve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class WorkerReport:
    """Cumulative ``counters`` (rows and bytes) and miss curves.

    ``counted`` is false where the workers count nothing. ``miss_curve``: (hot rows, fraction of
    distinct host-backed rows that would be loaded), rows ascending; empty where the workers do
    not measure it. ``request_curves``: by request, (hot rows of one group, rows that a step
    would load over all groups), rows ascending, exact up to what the request has; ``None``
    where the node cannot size requests one by one.
    """

    counters: dict[str, int] = field(default_factory=lambda: dict(NO_COUNTERS))
    miss_curve: tuple[tuple[int, float], ...] = ()
    counted: bool = True
    request_curves: Mapping[str, RowCurve] | None = None


@dataclass(frozen=True, slots=True)
class HotRows:
    """One request's hot buffer as the node's workers count it, in rows over all index groups."""

    capacity: int
    held: int
    references: int
    resident: int
    hits: int
    loads: int


NO_HOT_ROWS = HotRows(0, 0, 0, 0, 0, 0)


MAX_REQUESTS = 256
LEAST_STEPS = 8
"""Least sampled steps behind a curve; a change of size starts the count again."""
DISTINCT = [COUNTERS.index(name) for name in ("hits", "loads", "spills", "dropped")]
"""Columns of the counters that count distinct host-backed rows."""


def request_curves(
    states: Sequence[ResolverState],
    row_of: Sequence[tuple[str, int]],
    begun: Callable[[int, int], tuple[int, int]],
) -> dict[str, RowCurve]:
    """(hot rows of one group, rows loaded per step over all groups) by request.

    ``states``: one per index group. ``row_of``: requests and their state rows. ``begun(group,
    row)``: step and distinct rows when the request began there or its size last changed. Requests
    without enough sampled steps are omitted.
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
