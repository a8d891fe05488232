"""What one simulated run is measured by: every call, and the node once a virtual second."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class Sample:
    """The node at one virtual second; tokens of both pools, totals since the start."""

    at_s: float
    running: int
    waiting: int
    hisparse_blocks: int
    offload_blocks: int
    hisparse_reach_tokens: int
    offload_reach_tokens: int
    live_tokens: int
    multiplier: float
    gpu_free_blocks: int
    hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    link_bytes: float


@dataclass(slots=True)
class Measures:
    """Filled by the driver; ``from_s`` is where the measured part begins."""

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


def sample_of(
    report: EngineReport, at_s: float, tokens: tuple[int, int, int], link_bytes: float
) -> Sample:
    """``tokens``: hit, prompt and generated so far."""
    host, geometry = report.host, report.geometry
    idle = host.hisparse_capacity_blocks - host.hisparse_in_use_blocks
    chunks = host.lent_blocks * geometry.chunks_per_host_block
    in_use = host.hisparse_in_use_blocks * geometry.block_tokens
    return Sample(
        at_s=at_s,
        running=report.requests.running,
        waiting=report.requests.waiting,
        hisparse_blocks=host.hisparse_capacity_blocks,
        offload_blocks=host.lent_blocks,
        hisparse_reach_tokens=idle * geometry.block_tokens,
        offload_reach_tokens=max(0, chunks * geometry.chunk_tokens - in_use),
        live_tokens=report.live_set_tokens,
        multiplier=report.hot.multiplier,
        gpu_free_blocks=report.gpu_free_blocks,
        hit_tokens=tokens[0],
        prompt_tokens=tokens[1],
        generated_tokens=tokens[2],
        link_bytes=link_bytes,
    )
