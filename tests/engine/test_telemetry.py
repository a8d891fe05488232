"""What our stat logger keeps of vLLM's statistics, beside what vLLM's own do with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from hisparsed.engine.telemetry import HisparsedStatLogger


def logger(ranks: int) -> HisparsedStatLogger:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    return HisparsedStatLogger(config)


def test_samples_of_hot_buffers_reach_the_serving_counters() -> None:
    own = logger(ranks=2)
    assert own.counters().sampled_rows is None
    stats = {"cache_hits": [8, 8], "cache_misses": [2, 2], "host_to_device_bytes": [656, 656]}
    own.record(SchedulerStats(kv_connector_stats={"HiSparseConnector": stats}), None)
    own.record(SchedulerStats(), None)
    own.record(None, None)
    rows = own.counters().sampled_rows
    assert rows is not None
    assert (rows.hits_total, rows.misses_total, rows.h2d_bytes_total) == (8, 2, 656)
    assert rows.age_s >= 0


def test_vllms_statistics_are_left_as_they_are() -> None:
    stats = {"cache_hits": [8], "cache_misses": [2], "host_to_device_bytes": [656]}
    told = SchedulerStats(kv_connector_stats={"HiSparseConnector": stats})
    own = logger(ranks=1)
    own.record(told, None)
    own.record(told, None)
    assert stats == {"cache_hits": [8], "cache_misses": [2], "host_to_device_bytes": [656]}
