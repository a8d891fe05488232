"""The statistics that hisparsed's stat logger keeps, compared with those of vLLM's own loggers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats, SchedulerStats

from hisparsed.engine.telemetry import ClientStats, HisparsedStatLogger


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


def test_the_daemons_own_calls_are_in_no_statistics() -> None:
    processor = OutputProcessor(tokenizer=None, log_stats=True)
    ClientStats.of(processor, {"canary-1"})
    counted = IterationStats()
    for name in ("canary-1", "cmpl-canary-1"):
        state: Any = SimpleNamespace(
            request_id=f"{name}-0",
            external_req_id=name,
            stats=RequestStateStats(),
            is_prefilling=True,
            lora_name=None,
            prompt_len=3,
            max_tokens_param=1,
            num_cached_tokens=0,
            parent_req=None,
        )
        output: Any = SimpleNamespace(new_token_ids=[7], prefill_stats=None, events=None)
        processor._update_stats_from_output(state, output, 1.0, counted)
        processor._update_stats_from_finished(state, FinishReason.STOP, counted)
    assert counted.num_generation_tokens == len(counted.time_to_first_tokens_iter) == 1
    assert [one.request_id for one in counted.finished_requests] == ["cmpl-canary-1"]
