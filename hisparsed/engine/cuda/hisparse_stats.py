"""vLLM's own HiSparse counters, which its GPU workers sample once in 2,000 steps.

Between samples they stand still, so they are kept with the time of the last one: an old sample
says that nothing is known since, never that nothing happened. A node of ours with its own kernels
counts for itself; then these are only a second opinion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hisparsed.control.engine_port import SampledRows

CONNECTOR = "HiSparseConnector"
HITS, MISSES, H2D_BYTES = "cache_hits", "cache_misses", "host_to_device_bytes"
"""What every version has. Since 0.32 levels and lifetimes of host blocks stand beside them; those
the host ledger knows itself."""


class HiSparseStats:
    """``ranks``: GPUs that each count the same rows, and load each row over their own link."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._hits = 0
        self._misses = 0
        self._h2d_bytes = 0
        self._sampled_s: float | None = None

    def take(self, connector_stats: Mapping[str, Any] | None, now_s: float) -> None:
        """Add what one step brought, by connector; every list has a number a rank and group."""
        data = (connector_stats or {}).get(CONNECTOR) or {}
        if not data.get(HITS) and not data.get(MISSES):
            return
        self._hits += _total(data.get(HITS))
        self._misses += _total(data.get(MISSES))
        self._h2d_bytes += _total(data.get(H2D_BYTES))
        self._sampled_s = now_s

    def rows(self, now_s: float) -> SampledRows | None:
        """The sums of one GPU, and how old they are; ``None`` before the first sample."""
        if self._sampled_s is None:
            return None
        return SampledRows(
            hits=self._hits // self._ranks,
            misses=self._misses // self._ranks,
            h2d_bytes=self._h2d_bytes // self._ranks,
            age_s=now_s - self._sampled_s,
        )


def _total(values: Iterable[int] | None) -> int:
    return sum(int(value) for value in values or ())
