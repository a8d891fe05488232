"""The interface between engine and control side: one report, one command, serving counters.

The embedded vLLM implements ``EnginePort`` on every kind of node; test engines do too. Does not
start or stop the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hisparsed.engine.messages import ApplyResult
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import EngineReport, SampledRows


class EngineGone(Exception):  # noqa: N818 (a state of the node, not a mistake)
    """The engine has died and will not come back; the node must stop."""


@dataclass(frozen=True, slots=True)
class ServingCounters:
    """Cumulative counters of the API side; they never go back while an engine lives."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Found on the GPU or brought back from the host pools."""
    preemptions: int = 0
    refused: int | None = None
    """Calls that an admission limit refused; ``None`` if they are not counted."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests by vLLM's finish reason."""
    ttft_sum_s: float = 0.0
    ttft_count: int = 0
    itl_sum_s: float = 0.0
    itl_count: int = 0
    sampled_rows: SampledRows | None = None
    """``None`` before vLLM's first sample, and where its workers take none."""


class EnginePort(Protocol):
    """Every method raises ``EngineGone`` once the engine has died.

    Any other exception is one failed call: the next may work.
    """

    async def report(self) -> EngineReport:
        """One consistent picture, taken between two engine steps."""
        ...

    async def apply(self, command: EngineCommand) -> ApplyResult:
        """Apply a command, all or nothing; returns the values in force after it."""
        ...

    def serving(self) -> ServingCounters: ...


class HotPolicy(Protocol):
    """The policy's sizes of hot buffers, in top-k, for the decode rows of a request."""

    def highest_multiplier(self, decode_query_len: int) -> float: ...

    def start_multiplier(self, decode_query_len: int) -> float: ...
