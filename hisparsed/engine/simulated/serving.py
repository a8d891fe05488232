"""Serving counters of the simulated node, as vLLM's stat logger keeps them for real ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hisparsed.control.engine_port import ServingCounters


@dataclass(slots=True)
class _Open:
    arrived_s: float
    input_tokens: int
    last_token_s: float | None = None


class ServingTally:
    """Told of calls and tokens with their times; sums only."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._prompt = self._generated = self._hit = 0
        self._finished: Counter[str] = Counter()
        self._ttft_sum_s = self._itl_sum_s = 0.0
        self._ttft_count = self._itl_count = 0

    def arrived(self, request_id: str, input_tokens: int, now_s: float) -> None:
        self._open[request_id] = _Open(now_s, input_tokens)

    def emitted(self, request_id: str, tokens: int, cached: int | None, now_s: float) -> None:
        """``cached`` is given once, when a prompt is computed: its tokens from the caches."""
        call = self._open[request_id]
        self._generated += tokens
        if cached is not None:
            self._prompt += call.input_tokens
            self._hit += cached
        if not tokens:
            return
        if call.last_token_s is None:
            self._ttft_sum_s += now_s - call.arrived_s
            self._ttft_count += 1
        else:
            self._itl_sum_s += now_s - call.last_token_s
            self._itl_count += 1
        call.last_token_s = now_s

    def ended(self, request_id: str, reason: str) -> None:
        del self._open[request_id]
        self._finished[reason] += 1

    def counters(self, preemptions: int) -> ServingCounters:
        return ServingCounters(
            prompt_tokens=self._prompt,
            generated_tokens=self._generated,
            prefix_query_tokens=self._prompt,
            prefix_hit_tokens=self._hit,
            preemptions=preemptions,
            finished=dict(self._finished),
            ttft_sum_s=self._ttft_sum_s,
            ttft_count=self._ttft_count,
            itl_sum_s=self._itl_sum_s,
            itl_count=self._itl_count,
        )
