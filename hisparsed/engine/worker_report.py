"""What a node's workers count about hot buffers, for the control report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
