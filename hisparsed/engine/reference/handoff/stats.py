"""What handed-over prefixes are counted by, on both sides, for vLLM's own metrics page.

Counts travel as vLLM's connector stats: deltas from the engine, summed where they are read.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

MEANINGS = {
    "offered": "Prefixes that were kept for a decode node.",
    "read": "Offered prefixes that a decode node has read, or needed nothing of.",
    "expired": "Offered prefixes that nobody read within their lease.",
    "sent_bytes": "Row bytes sent to decode nodes.",
    "fetched": "Prefixes fetched from a prefill node, whole and checked.",
    "failed": "Prefixes that could not be fetched; their prompts were computed here.",
    "refused": "Calls with transfer parameters that cannot be right; computed here.",
    "fetched_tokens": "Prompt tokens that were fetched instead of computed.",
    "fetched_bytes": "Row bytes fetched from prefill nodes.",
    "recomputed_tokens": "Prompt tokens of failed fetches.",
}
"""Every count, and the help text of its metric."""
METRIC_PREFIX = "vllm:hisparsed_handoff_"
"""vLLM drops collectors of its own prefix when a new engine starts in the same process; others
would be registered twice."""


class HandoffStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: counts by the names in ``MEANINGS``; absent is zero."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def add(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"handoff {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HandoffPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter a count, registered once in the process that serves the metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=f"{METRIC_PREFIX}{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in MEANINGS.items()
        }

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
