"""What vLLM tells about serving, as cumulative counters: a stat logger of ours.

Runs in the API process. Keeps sums only; windows and rates are the policy's business. Reads
vLLM's stats and keeps no reference to them.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from hisparsed.control.engine_port import ServingCounters
from hisparsed.engine.cuda.hisparse_stats import HiSparseStats


class HisparsedStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Also an entry point of ``vllm.stat_logger_plugins``; harmless outside hisparsed."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._hit_tokens = 0
        self._preemptions = 0
        self._finished: Counter[str] = Counter()
        self._ttft_sum_s = 0.0
        self._ttft_count = 0
        self._itl_sum_s = 0.0
        self._itl_count = 0
        self._rows = HiSparseStats(vllm_config.parallel_config.world_size)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._rows.take(scheduler_stats.kv_connector_stats, time.monotonic())
        if iteration_stats is None:
            return
        prompt = iteration_stats.prompt_token_stats
        self._prompt_tokens += prompt.total
        self._hit_tokens += prompt.local_cache_hit + prompt.external_kv_transfer
        self._generated_tokens += iteration_stats.num_generation_tokens
        self._preemptions += iteration_stats.num_preempted_reqs
        for finished in iteration_stats.finished_requests:
            self._finished[str(finished.finish_reason)] += 1
        self._ttft_sum_s += sum(iteration_stats.time_to_first_tokens_iter)
        self._ttft_count += len(iteration_stats.time_to_first_tokens_iter)
        self._itl_sum_s += sum(iteration_stats.inter_token_latencies_iter)
        self._itl_count += len(iteration_stats.inter_token_latencies_iter)

    def log_engine_initialized(self) -> None:
        """vLLM's own logger announces the engine."""

    def counters(self) -> ServingCounters:
        """The sums so far. Every prompt token is one prefix query, as vLLM counts them."""
        return ServingCounters(
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            finished=dict(self._finished),
            ttft_sum_s=self._ttft_sum_s,
            ttft_count=self._ttft_count,
            itl_sum_s=self._itl_sum_s,
            itl_count=self._itl_count,
            sampled_rows=self._rows.rows(time.monotonic()),
        )
