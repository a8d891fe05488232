"""What a run measured, made up: samples and calls as figures are counted from."""

from __future__ import annotations

from typing import Any

from hisparsed.simulate.measures import CallTimes, Measures, Sample


def sample(at_s: float, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "running": 2,
        "waiting": 1,
        "hisparse_blocks": 90,
        "offload_blocks": 10,
        "hisparse_reach_tokens": 1000,
        "offload_reach_tokens": 800,
        "live_tokens": 400,
        "multiplier": 1.0,
        "gpu_free_blocks": 5,
        "hit_tokens": 0,
        "prompt_tokens": 0,
        "generated_tokens": int(at_s * 10),
        "link_bytes": at_s * 100.0,
    }
    return Sample(at_s=at_s, **{**values, **changes})


def call(arrived: float, first: float, end: float, play: str = "a", cached: int = 60) -> CallTimes:
    return CallTimes(play, 0, 100, 11, arrived, first, end, cached)


def measured(*calls: CallTimes) -> Measures:
    return Measures(10.0, 110.0, calls=list(calls), samples=[sample(10.0), sample(110.0)])
