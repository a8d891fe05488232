"""vLLM's rare samples of hot buffers: sums of one GPU, and an age instead of a zero."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import stats as vllm_stats
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker as vllm_worker
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from hisparsed.control.engine_port import SampledRows
from hisparsed.engine.cuda.hisparse_stats import H2D_BYTES, HITS, MISSES, HiSparseStats


def sample(hits: list[int], misses: list[int], sent: list[int], **more: Any) -> dict[str, Any]:
    return {"HiSparseConnector": {HITS: hits, MISSES: misses, H2D_BYTES: sent, **more}}


OLD = sample([90, 60], [10, 40], [6_560, 26_240])
"""As vLLM 0.30 and 0.31 tell it: two index groups."""
NEW = sample([90, 60], [10, 40], [6_560, 26_240], host_cache_usage_perc=[0.5])
"""As 0.32 and 0.33 do, with levels beside the counters."""


@pytest.mark.parametrize("step", [OLD, NEW], ids=["0.30", "0.32"])
def test_samples_of_both_generations_add_up(step: dict[str, Any]) -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(step, 10.0)
    stats.take(step, 50.0)
    assert stats.rows(53.0) == SampledRows(hits=300, misses=100, h2d_bytes=65_600, age_s=3.0)


def test_ranks_count_the_same_rows_so_figures_are_of_one_gpu() -> None:
    stats = HiSparseStats(ranks=2)
    stats.take(sample([90, 90], [10, 10], [656, 656]), 1.0)
    assert stats.rows(1.0) == SampledRows(hits=90, misses=10, h2d_bytes=656, age_s=0.0)


def test_before_the_first_sample_nothing_is_known() -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(None, 1.0)
    stats.take({}, 2.0)
    stats.take({"OffloadingConnector": {"x": 1}}, 3.0)
    assert stats.rows(4.0) is None


@pytest.mark.parametrize(
    "between",
    [None, {"OffloadingConnector": {}}, sample([], [], [], host_cache_usage_perc=[0.7])],
    ids=["nothing", "another connector", "levels only"],
)
def test_steps_without_a_sample_age_the_last_one(between: Any) -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(OLD, 10.0)
    stats.take(between, 70.0)
    rows = stats.rows(70.0)
    assert rows is not None
    assert (rows.hits, rows.age_s) == (150, 60.0)


def test_vllm_tells_it_in_these_words() -> None:
    own = vllm_stats.HiSparseKVConnectorStats()
    own.record_snapshot(hits=90, misses=10, host_to_device_bytes=6_560)
    of_all = MultiKVConnectorStats()
    of_all["HiSparseConnector"] = own
    stats = HiSparseStats(ranks=1)
    stats.take(of_all.to_dict(), 1.0)
    assert stats.rows(1.0) == SampledRows(hits=90, misses=10, h2d_bytes=6_560, age_s=0.0)
    assert vllm_worker._METRICS_INTERVAL == 2000
