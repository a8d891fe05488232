"""The measurements of a run, and its figures as the table and the JSON show them.

The driver records every call, and the node once a virtual second. Rates are of the whole node: a
run at scale 1/8 counts eightfold. Counts are as simulated. Also how soon a run recovers from a
change of traffic, and how far a scaled node is from the whole node. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from pydantic import BaseModel, ConfigDict

from hisparsed.policy.forecasts import ErrorShare, Figure, error_shares
from hisparsed.policy.reach import reach_now
from hisparsed.policy.signals import EngineReport, Lever


@dataclass(slots=True)
class CallTimes:
    """One call; times in virtual seconds, ``None`` until they come."""

    play: str
    """The play of a session that it belongs to."""
    index: int
    input_tokens: int
    output_tokens: int
    arrived_s: float
    """When the client first sent it; being held and waiting after a refusal count."""
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
    """Figures of a node at one virtual second; tokens and bytes are totals since the start."""

    at_s: float
    running: int
    waiting: int
    gpu_free_blocks: int
    hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    link_bytes: float
    core_s: float
    """CPU time of the engine core."""


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
    judged: list[tuple[Lever, Mapping[Figure, float]]] = field(default_factory=list)
    """Errors of the predictions of each move, in the whole run."""

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
    reach = reach_now(report)
    return Sample(
        **own,
        hisparse_blocks=report.hisparse.capacity_blocks,
        offload_blocks=report.offload.lent_blocks,
        hisparse_reach_tokens=reach.hisparse_tokens,
        offload_reach_tokens=reach.offload_tokens,
        live_tokens=report.sessions.live_set_tokens,
        multiplier=report.hot.multiplier,
    )


class Limits(BaseModel):
    """A call is good when it keeps both, in seconds."""

    model_config = ConfigDict(frozen=True)

    ttft_s: float = 30.0
    itl_s: float = 0.1


class PolicyResult(BaseModel):
    """One policy on one workload, from the end of the warm-up on."""

    model_config = ConfigDict(frozen=True)

    name: str
    users: int | None
    seed: int
    sessions: int
    """Sessions that had a call finished."""
    calls: int
    calls_per_hour: float
    throughput: float
    """Output tokens per second."""
    goodput: float
    """Calls an hour that keep both limits."""
    prefix_hit_tokens: int
    recomputed_tokens: int
    """Prompt tokens that no cache had."""
    preemptions: int
    occupancy: float
    """Requests running at a time, mean."""
    waiting: float
    ttft_p50_s: float | None
    """``None``, as the next and ``itl_p50_s``, where no call finished."""
    ttft_p99_s: float | None
    unserved_s: float = 0.0
    """At the end, the longest wait of a call that has no token yet."""
    ttft_s: tuple[float, ...] = ()
    """Of every call, ascending."""
    itl_p50_s: float | None
    load: float | None
    """Live set / smaller reach, mean; ``None`` without HiSparse, and where a pool is empty."""
    link_use: float
    """Share of the time that one GPU's link would need for its bytes at copy speed."""
    moves: int
    refused: int
    failed: int
    steps: int
    core_use: float = 0.0
    """Share of the time that the engine core's CPU needs, by the node's description."""
    trace_load: float | None = None
    """How many times as fast as recorded sessions start, where the trace says when."""
    paired_calls: int = 0
    """Calls that the first policy of the table finished, and this one too, whenever."""
    paired_ttft_p99_s: float = 0.0
    """Of the calls that both finished, under this policy."""
    base_ttft_p99_s: float = 0.0
    """Of the calls that both finished, under the first policy."""
    paired_ttft_s: tuple[float, ...] = ()
    """Of the calls that both finished, ascending, under this policy."""
    base_ttft_s: tuple[float, ...] = ()
    recovered_calls_per_hour: float | None = None
    """From five minutes after a change of traffic on; ``None`` where it did not change."""
    settled_s: float | None = None
    """From the change until the split had arrived where it ended."""
    predictions: tuple[ErrorShare, ...] = ()
    """Errors of the predictions of moves, in the whole run."""


def summarise(
    name: str,
    users: int | None,
    seed: int,
    measures: Measures,
    *,
    scale: Fraction,
    copy_bandwidth: float,
    limits: Limits,
    trace_load: float | None = None,
) -> PolicyResult:
    """Raises ``ValueError`` when nothing was measured."""
    span_s = measures.until_s - measures.from_s
    whole = float(1 / scale)
    done = finished_calls(measures)
    good = [call for call in done if call.ttft_s <= limits.ttft_s and call.itl_s <= limits.itl_s]
    samples = [one for one in measures.samples if one.at_s >= measures.from_s]
    if not samples:
        raise ValueError("the run ended within its warm-up")
    hours = span_s / 3600
    inputs = sum(call.input_tokens for call in done)
    hits = sum(call.cached_tokens for call in done)
    first, last = samples[0], samples[-1]
    generated = last.generated_tokens - first.generated_tokens
    link_bytes = last.link_bytes - first.link_bytes
    # One sample shows no growth, whatever the time.
    sampled_s = last.at_s - first.at_s or span_s
    ttfts = _ascending(call.ttft_s for call in done)
    unserved = [
        measures.until_s - call.arrived_s
        for call in measures.calls
        if call.first_token_s is None and not call.failed
    ]
    itls = sorted(call.itl_s for call in done)
    return PolicyResult(
        name=name,
        users=users,
        seed=seed,
        sessions=len({call.play for call in done}),
        calls=len(done),
        calls_per_hour=len(done) / hours * whole,
        throughput=generated / sampled_s * whole,
        goodput=len(good) / hours * whole,
        prefix_hit_tokens=hits,
        recomputed_tokens=inputs - hits,
        preemptions=measures.preemptions,
        occupancy=_mean([one.running for one in samples]) * whole,
        waiting=_mean([one.waiting for one in samples]) * whole,
        ttft_p50_s=quantile(ttfts, 0.5) if done else None,
        ttft_p99_s=quantile(ttfts, 0.99) if done else None,
        unserved_s=round(max(unserved, default=0.0), 3),
        ttft_s=ttfts,
        itl_p50_s=quantile(itls, 0.5) if done else None,
        load=_load(samples),
        link_use=link_bytes * whole / copy_bandwidth / sampled_s,
        moves=measures.moves,
        refused=measures.refused,
        failed=sum(call.failed for call in measures.calls if _measured(call, measures.from_s)),
        steps=measures.steps,
        core_use=(last.core_s - first.core_s) / sampled_s,
        trace_load=trace_load,
        predictions=tuple(error_shares(measures.judged)),
    )


def paired(result: PolicyResult, measures: Measures, base: Measures) -> PolicyResult:
    """``result`` of ``measures`` with the waits of the calls that ``base`` finished too.

    Calls are the same where the play of a session and the number of the call in it are. Those of
    ``base`` are of its measured part. Here they count whenever they ended: a policy that is ahead
    had most of them earlier, and within its own measured part only those that it held back.
    """
    own = {(call.play, call.index): call.ttft_s for call in finished_calls(measures, from_s=0.0)}
    others = {(call.play, call.index): call.ttft_s for call in finished_calls(base)}
    both = own.keys() & others.keys()
    here, there = _ascending(own[one] for one in both), _ascending(others[one] for one in both)
    return result.model_copy(
        update={
            "paired_calls": len(both),
            "paired_ttft_p99_s": quantile(here, 0.99),
            "base_ttft_p99_s": quantile(there, 0.99),
            "paired_ttft_s": here,
            "base_ttft_s": there,
        }
    )


def finished_calls(measures: Measures, from_s: float | None = None) -> list[CallTimes]:
    """Calls that finished, and not in vain, within the measured part, or from ``from_s`` on."""
    since_s = measures.from_s if from_s is None else from_s
    return [call for call in measures.calls if _measured(call, since_s) and not call.failed]


def _measured(call: CallTimes, since_s: float) -> bool:
    return call.finished_s is not None and call.finished_s >= since_s


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of ascending values; 0 for none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ascending(seconds: Iterable[float]) -> tuple[float, ...]:
    """To the millisecond."""
    return tuple(sorted(round(one, 3) for one in seconds))


def _load(samples: Sequence[Sample]) -> float | None:
    """Live set by the smaller reach, mean over the samples where both pools reach anywhere."""
    pairs = [
        (one.live_tokens, min(one.hisparse_reach_tokens, one.offload_reach_tokens))
        for one in samples
    ]
    shares = [live / reach for live, reach in pairs if reach > 0]
    return _mean(shares) if shares else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


RECOVERY_S = 300.0
"""From this long after the change on, the node counts as recovered."""
NEAR = 0.01
"""Of the host budget: a split this close to its last one has arrived."""


def after_change(
    result: PolicyResult, measures: Measures, change_s: float, scale: float
) -> PolicyResult:
    """``result`` with the calls per hour of the whole node after ``RECOVERY_S``, and the seconds
    until the split reached its final value."""
    from_s = change_s + RECOVERY_S
    if from_s >= measures.until_s:
        return result
    late = sum((call.finished_s or 0.0) >= from_s for call in finished_calls(measures))
    hours = (measures.until_s - from_s) / 3600
    return result.model_copy(
        update={
            "recovered_calls_per_hour": late / hours / scale,
            "settled_s": _settled_s(measures, change_s),
        }
    )


def _settled_s(measures: Measures, change_s: float) -> float:
    after = [one for one in measures.samples if one.at_s >= change_s]
    last = _offload_share(after[-1])
    away = [one.at_s for one in after if abs(_offload_share(one) - last) > NEAR]
    return max(away) - change_s if away else 0.0


def _offload_share(one: Sample) -> float:
    return one.offload_blocks / max(1, one.offload_blocks + one.hisparse_blocks)


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
