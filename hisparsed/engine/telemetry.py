"""A stat logger: vLLM's figures of serving as cumulative counters.

Runs in the API process. Keeps sums only; the policy computes windows and rates. Reads vLLM's stats
and keeps no reference to them. ``ClientStats`` keeps the daemon's own calls out of them, and so out
of vLLM's metrics too.

``HiSparseStats`` are vLLM's own counters of hot buffers, which its workers sample once in 2,000
steps. They are kept with the time of the last sample: an old sample means that nothing is known
since then, not that nothing happened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerBase

from hisparsed.engine.port import ServingCounters
from hisparsed.policy.signals import SampledRows

CONNECTOR = "HiSparseConnector"
HITS, MISSES, H2D_BYTES = "cache_hits", "cache_misses", "host_to_device_bytes"
"""Figures that every version has. Since 0.32 vLLM also reports levels and lifetimes of host blocks,
which the host ledger knows itself."""


class HiSparseStats:
    """``ranks``: GPUs that each count the same rows, and load each row over their own link."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._hits = 0
        self._misses = 0
        self._h2d_bytes = 0
        self._sampled_s: float | None = None

    def take(self, connector_stats: Mapping[str, Any] | None, now_s: float) -> None:
        """Add the counts of one step, by connector; every list has one number per rank and
        group."""
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
            hits_total=self._hits // self._ranks,
            misses_total=self._misses // self._ranks,
            h2d_bytes_total=self._h2d_bytes // self._ranks,
            age_s=now_s - self._sampled_s,
        )


def _total(values: Iterable[int] | None) -> int:
    return sum(int(value) for value in values or ())


class ClientStats(OutputProcessor):  # type: ignore[misc]
    """vLLM's output processor, whose statistics are of clients' calls alone."""

    own: Collection[str]
    """The daemon's own calls, by the ids that it gave them."""

    @classmethod
    def of(cls, processor: OutputProcessor, own: Collection[str]) -> None:
        """Change the class of vLLM's ``processor`` to this one."""
        processor.__class__ = cls
        processor.own = own

    def _counts(self, req_state: Any) -> bool:
        return req_state.external_req_id not in self.own

    def _update_stats_from_output(
        self,
        req_state: Any,
        engine_core_output: Any,
        engine_core_timestamp: float | None,
        iteration_stats: Any,
    ) -> None:
        if self._counts(req_state):
            super()._update_stats_from_output(
                req_state, engine_core_output, engine_core_timestamp, iteration_stats
            )

    def _update_stats_from_finished(
        self, req_state: Any, finish_reason: Any, iteration_stats: Any
    ) -> None:
        if self._counts(req_state):
            super()._update_stats_from_finished(req_state, finish_reason, iteration_stats)


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
        """vLLM's own logger logs the start of the engine."""

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
