"""The result of each call, the figures of a replay, and the comparison of two replays.

Plain values: measuring is the client's work. Percentiles interpolate linearly between the two
nearest values and count answered calls only.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CallKey = tuple[str, int]
StopReason = Literal["end_of_trace", "time_up", "interrupted", "endpoint_lost"]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call, answered or failed. Times in seconds, `started_s` from the start of the replay.

    `ttft_s` and `seconds` start at the first attempt, so waiting after a 429 is part of them.
    `itl_s` are the gaps between two pieces of the stream that carry tokens. `error` is None or a
    kind such as `http_400`, `timeout`, `connect`, `broken_stream`. `digest` stands for the output:
    of token ids where the endpoint returns them, else of the text (`digest_of`).
    """

    session_id: str
    call_index: int
    error: str | None
    detail: str
    started_s: float
    seconds: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    prefix_hit_tokens: int | None
    retries: int
    retry_wait_s: float
    digest: str
    digest_of: Literal["tokens", "text"]

    @property
    def key(self) -> CallKey:
        """(session id, index of the call in the recorded session)."""
        return self.session_id, self.call_index

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All calls of one replay in the order they ended.

    `unfinished` calls were in flight when the replay stopped. `preemptions` is what the endpoint's
    own counter grew by, None where it has none.
    """

    calls: tuple[CallResult, ...]
    seconds: float
    stopped_by: StopReason
    unfinished: int
    clipped: int
    dropped: int
    preemptions: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outputs of two replays: `compared` calls ended well in both, `differing` of them differ.

    `not_comparable` calls have token ids in one replay and only text in the other.
    """

    compared: int
    differing: tuple[CallKey, ...]
    not_comparable: tuple[CallKey, ...]
    only_in_a: int
    only_in_b: int


def compare(a: Iterable[CallResult], b: Iterable[CallResult]) -> Comparison:
    """Compare two replays by session and call index; failed calls are omitted."""
    answered_a = {call.key: call for call in a if call.error is None}
    answered_b = {call.key: call for call in b if call.error is None}
    both = [key for key in answered_a if key in answered_b]
    unlike = [key for key in both if answered_a[key].digest_of != answered_b[key].digest_of]
    alike = [key for key in both if answered_a[key].digest_of == answered_b[key].digest_of]
    return Comparison(
        compared=len(alike),
        differing=tuple(key for key in alike if answered_a[key].digest != answered_b[key].digest),
        not_comparable=tuple(unlike),
        only_in_a=len(answered_a) - len(both),
        only_in_b=len(answered_b) - len(both),
    )


_SECONDS_PER_HOUR = 3600.0
_STOPPED = {
    "end_of_trace": "to the end of the trace",
    "time_up": "until its time was up",
    "interrupted": "until it was interrupted",
    "endpoint_lost": "until the endpoint stopped answering",
}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a set of durations, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """`requests` were answered, `failed` were not (`errors` by kind), `unfinished` were cut off.

    `prefix_hit_tokens` and `preemptions` are None where the endpoint does not report them.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    first_error: str | None
    unfinished: int
    retries: int
    retry_wait_s: float
    clipped: int
    dropped: int
    tokens_in: int
    tokens_out: int
    prefix_hit_tokens: int | None
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    seconds: float
    requests_per_hour: float
    preemptions: int | None
    stopped_by: StopReason

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """A few lines for a person."""
        lines = [
            f"Replayed {self.requests} calls in {self.seconds:.1f} s, {_STOPPED[self.stopped_by]}: "
            f"{self.requests_per_hour:.0f} calls per hour.",
            f"Tokens: {self.tokens_in:,} in, {self.tokens_out:,} out; prefix hits: {self._hits()}.",
            f"Time to first token: {_percentiles_text(self.ttft_s)}.",
            f"Between tokens: {_percentiles_text(self.itl_s)}.",
        ]
        if self.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.items())
            lines.append(f"Failed: {self.failed} ({kinds}); the first: {self.first_error}")
        if self.unfinished:
            lines.append(f"Cut off while in flight: {self.unfinished}.")
        if self.retries:
            lines.append(f"Sent again: {self.retries} times, {self.retry_wait_s:.1f} s of waiting.")
        if self.clipped or self.dropped:
            lines.append(
                f"Over the length limit: {self.clipped} with a shortened output, "
                f"{self.dropped} skipped."
            )
        if self.preemptions is not None:
            lines.append(f"Preemptions: {self.preemptions}.")
        return "\n".join(lines)

    def _hits(self) -> str:
        if self.prefix_hit_tokens is None:
            return "not reported (vLLM needs --enable-prompt-tokens-details)"
        share = self.prefix_hit_tokens / self.tokens_in if self.tokens_in else 0.0
        return f"{self.prefix_hit_tokens:,} ({share:.1%} of the input)"


def summarise(result: ReplayResult) -> ReplaySummary:
    """The figures of `result`."""
    answered = [call for call in result.calls if call.error is None]
    failed = [call for call in result.calls if call.error is not None]
    hits = [call.prefix_hit_tokens for call in answered if call.prefix_hit_tokens is not None]
    first = f"{failed[0].error} {failed[0].detail}".strip() if failed else None
    return ReplaySummary(
        requests=len(answered),
        failed=len(failed),
        errors=dict(Counter(call.error for call in failed if call.error)),
        first_error=first,
        unfinished=result.unfinished,
        retries=sum(call.retries for call in result.calls),
        retry_wait_s=sum(call.retry_wait_s for call in result.calls),
        clipped=result.clipped,
        dropped=result.dropped,
        tokens_in=sum(call.prompt_tokens for call in answered),
        tokens_out=sum(call.completion_tokens for call in answered),
        prefix_hit_tokens=sum(hits) if hits else None,
        ttft_s=_percentiles([call.ttft_s for call in answered if call.ttft_s is not None]),
        itl_s=_percentiles([gap for call in answered for gap in call.itl_s]),
        seconds=result.seconds,
        requests_per_hour=(
            len(answered) / result.seconds * _SECONDS_PER_HOUR if result.seconds > 0 else 0.0
        ),
        preemptions=result.preemptions,
        stopped_by=result.stopped_by,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    ordered = sorted(values)
    return Percentiles(
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `ordered` lies; `ordered` ascends, not empty."""
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _percentiles_text(values: Percentiles | None) -> str:
    if values is None:
        return "not measured"
    return (
        f"p50 {values.p50:.3f} s, p90 {values.p90:.3f} s, p99 {values.p99:.3f} s, "
        f"max {values.max:.3f} s"
    )
