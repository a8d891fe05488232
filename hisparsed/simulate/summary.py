"""The figures of one run, as the table and the JSON show them. Pure.

Rates are of the whole node: a run at scale 1/8 counts eightfold. Counts are as simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from pydantic import BaseModel, ConfigDict

from hisparsed.simulate.measures import CallTimes, Measures, Sample


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
    """Output tokens a second."""
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
    trace_load: float | None = None
    """How many times as fast as recorded sessions start, where the trace says when."""
    paired_calls: int = 0
    """Calls that the first policy of the table finished, and this one too, whenever."""
    paired_ttft_p99_s: float = 0.0
    """Of those calls, under this policy."""
    base_ttft_p99_s: float = 0.0
    """Of those calls, under the first policy."""
    paired_ttft_s: tuple[float, ...] = ()
    """Of those calls, ascending, under this policy."""
    base_ttft_s: tuple[float, ...] = ()
    recovered_calls_per_hour: float | None = None
    """From five minutes after a change of traffic on; ``None`` where it did not change."""
    settled_s: float | None = None
    """From the change until the split had arrived where it ended."""


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
        trace_load=trace_load,
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
