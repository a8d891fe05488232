"""What one simulated run is measured by: every call, and the node once a virtual second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hisparsed.engine.messages import EngineReport


@dataclass(slots=True)
class CallTimes:
    """One call; times in virtual seconds, ``None`` until they come."""

    play: str
    """The play of a session that it belongs to."""
    index: int
    input_tokens: int
    output_tokens: int
    arrived_s: float
    """When the client first sent it; waiting at the gate and after a refusal counts."""
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    failed: bool = False

    @property
    def ttft_s(self) -> float:
        if self.first_token_s is None:
            raise ValueError("the call has no token yet")
        return self.first_token_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens; 0 for a single one."""
        if self.finished_s is None or self.first_token_s is None:
            raise ValueError("the call has not finished")
        return (self.finished_s - self.first_token_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class BareSample:
    """What any node shows at one virtual second; tokens and bytes are totals since the start."""

    at_s: float
    running: int
    waiting: int
    gpu_free_blocks: int
    hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    link_bytes: float


@dataclass(frozen=True, slots=True)
class Sample(BareSample):
    """With the pools and levers of HiSparse; zero without it."""

    hisparse_blocks: int = 0
    offload_blocks: int = 0
    hisparse_reach_tokens: int = 0
    offload_reach_tokens: int = 0
    live_tokens: int = 0
    multiplier: float = 0.0


@dataclass(slots=True)
class Measures:
    """Filled by the driver; ``from_s`` is where the measured part begins.

    Calls, samples and sentences are of the whole run, counts of the measured part.
    """

    from_s: float
    until_s: float
    calls: list[CallTimes] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    moves: int = 0
    refused: int = 0
    preemptions: int = 0
    steps: int = 0
    journal_lost: int = 0
    sentences: list[tuple[float, str]] = field(default_factory=list)

    def count_refusal(self, at_s: float) -> None:
        self.refused += at_s >= self.from_s

    def count_moves(self, at_s: float, moves: int) -> None:
        if at_s >= self.from_s:
            self.moves += moves


def sample_of(bare: BareSample, report: EngineReport | None) -> Sample:
    """``report`` is ``None`` for a node without HiSparse."""
    own: dict[str, Any] = asdict(bare)
    if report is None:
        return Sample(**own)
    host, geometry = report.host, report.geometry
    idle = host.hisparse_capacity_blocks - host.hisparse_in_use_blocks
    chunks = host.lent_blocks * geometry.chunks_per_host_block
    in_use = host.hisparse_in_use_blocks * geometry.block_tokens
    return Sample(
        **own,
        hisparse_blocks=host.hisparse_capacity_blocks,
        offload_blocks=host.lent_blocks,
        hisparse_reach_tokens=idle * geometry.block_tokens,
        offload_reach_tokens=max(0, chunks * geometry.chunk_tokens - in_use),
        live_tokens=report.live_set_tokens,
        multiplier=report.hot.multiplier,
    )
