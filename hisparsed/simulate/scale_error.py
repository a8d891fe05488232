"""How far a scaled node is from the whole one: the same short run on both, compared. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hisparsed.simulate.summary import PolicyResult

COMPARED = ("calls_per_hour", "throughput", "occupancy", "ttft_p50_s", "itl_p50_s")


class ScaleError(BaseModel):
    """Scaled over whole, less one; ``hit_points`` is a difference of shares."""

    model_config = ConfigDict(frozen=True)

    policy: str
    calls_per_hour: float
    throughput: float
    occupancy: float
    ttft_p50_s: float
    itl_p50_s: float
    hit_points: float


def scale_error(part: PolicyResult, whole: PolicyResult) -> ScaleError:
    pairs = {name: (getattr(part, name), getattr(whole, name)) for name in COMPARED}
    ratios = {
        name: own / other - 1 if own and other else 0.0 for name, (own, other) in pairs.items()
    }
    return ScaleError(policy=part.name, hit_points=_hit_share(part) - _hit_share(whole), **ratios)


def error_text(error: ScaleError) -> str:
    """One sentence."""
    return (
        f"Against the whole node over the same time, {error.policy}: "
        f"calls {error.calls_per_hour:+.0%}, tokens {error.throughput:+.0%}, "
        f"running {error.occupancy:+.0%}, TTFT {error.ttft_p50_s:+.0%}, "
        f"ITL {error.itl_p50_s:+.0%}, hit share {error.hit_points * 100:+.1f} points."
    )


def _hit_share(one: PolicyResult) -> float:
    return one.prefix_hit_tokens / max(1, one.prefix_hit_tokens + one.recomputed_tokens)
