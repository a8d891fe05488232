"""What a node's workers count about hot buffers, for the control report."""

from __future__ import annotations

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


@dataclass(frozen=True)
class WorkerReport:
    """Cumulative ``counters`` (rows and bytes) and the pooled miss curve.

    ``miss_curve``: (hot rows, fraction of distinct host-backed rows that would be loaded),
    rows ascending; empty where the workers do not measure it.
    """

    counters: dict[str, int] = field(default_factory=lambda: dict(NO_COUNTERS))
    miss_curve: tuple[tuple[int, float], ...] = ()
