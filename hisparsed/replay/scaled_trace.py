"""A trace made smaller or larger: scaled calls, their prompts, and how large the result is.

Scaling keeps prefix relations. Block k covers the tokens from floor(k x block x factor) to
floor((k + 1) x block x factor), so calls that share n blocks share the same prompt prefix. Think
times are not scaled here. The same block id gives the same pseudo-random tokens in every call. A
replay sends the same prompts whatever comes back, since the next recorded input already contains
the recorded response. Live sets count what `concurrency` sessions hold at one moment, shared
blocks once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from hashlib import shake_128
from itertools import islice
from typing import Any

from hisparsed.errors import UserError
from hisparsed.replay.trace import BlockRun, Call, Trace, block_ids


@dataclass(frozen=True, slots=True)
class Scale:
    """Token counts times `factor`; full blocks held `block_tokens` tokens before.

    Raises UserError when a block would keep less than one token, because then calls that differ
    would become equal.
    """

    factor: Fraction
    block_tokens: int

    def __post_init__(self) -> None:
        if self.factor * self.block_tokens < 1:
            raise UserError(
                f"scale: {self.factor} leaves a block of {self.block_tokens} tokens less than one "
                f"token; use 1/{self.block_tokens} or more"
            )

    def tokens(self, count: int) -> int:
        """`count` tokens scaled, rounded down, at least 1."""
        return max(1, self._floor(count))

    def block_start(self, position: int) -> int:
        """The first token of the block at `position` (0 is the first block)."""
        return self._floor(position * self.block_tokens)

    def _floor(self, count: int) -> int:
        return count * self.factor.numerator // self.factor.denominator


@dataclass(frozen=True, slots=True)
class ScaledCall:
    """A call as it will be sent: tokens scaled, `index` its place in the recorded session."""

    index: int
    blocks: tuple[BlockRun, ...]
    tail_block: int
    input_tokens: int
    output_tokens: int
    think_time_s: float


@dataclass(frozen=True, slots=True)
class ScaledSession:
    """The calls of one session that are to be sent, in order."""

    id: str
    calls: tuple[ScaledCall, ...]
    start_s: float


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """`clipped` calls had their output shortened to the limit; `dropped` did not fit at all."""

    scale: Scale
    sessions: tuple[ScaledSession, ...]
    clipped: int
    dropped: int

    @property
    def calls(self) -> int:
        """How many calls all sessions have together."""
        return sum(len(session.calls) for session in self.sessions)


def scale_trace(trace: Trace, factor: Fraction, max_model_len: int | None = None) -> ScaledTrace:
    """`trace` with token counts times `factor`, within `max_model_len` tokens per call.

    A call whose input leaves room for less than one output token is dropped rather than cut: a cut
    input would repeat a prefix that was not sent. An output that does not fit is clipped.
    """
    scale = Scale(factor, trace.block_tokens)
    clipped = dropped = 0
    sessions = []
    for session in trace.sessions:
        calls = []
        for index, call in enumerate(session.calls):
            scaled = _scaled_call(call, index, scale)
            room = scaled.output_tokens
            if max_model_len is not None:
                room = max_model_len - scaled.input_tokens
            if room < 1:
                dropped += 1
                continue
            if room < scaled.output_tokens:
                clipped += 1
                scaled = replace(scaled, output_tokens=room)
            calls.append(scaled)
        if calls:
            sessions.append(ScaledSession(session.id, tuple(calls), session.start_s))
    return ScaledTrace(scale, tuple(sessions), clipped, dropped)


def _scaled_call(call: Call, index: int, scale: Scale) -> ScaledCall:
    return ScaledCall(
        index=index,
        blocks=call.blocks,
        tail_block=call.tail_block,
        input_tokens=scale.tokens(call.input_tokens),
        output_tokens=scale.tokens(call.output_tokens),
        think_time_s=call.think_time_s,
    )


_HASH_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids from `low` to below `high`; the default is printable ASCII."""

    low: int = 32
    high: int = 127

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise UserError(
                f"token range: {self.low}:{self.high} is not right; need LOW:HIGH with LOW 0 or "
                "more and at least two ids below HIGH"
            )

    @property
    def is_ascii_text(self) -> bool:
        """Whether each id is also the code of a printable character."""
        return self.low >= 32 and self.high <= 127


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Builds prompts of one scaled trace. `seed` changes every token and no prefix relation."""

    scale: Scale
    seed: int
    tokens: TokenRange

    def token_ids(self, call: ScaledCall) -> list[int]:
        """The prompt of `call`, exactly `call.input_tokens` ids."""
        ids: list[int] = []
        for position, block in enumerate(block_ids(call.blocks), start=1):
            ids.extend(self._block(block, self.scale.block_start(position) - len(ids)))
        ids.extend(self._block(call.tail_block, call.input_tokens - len(ids)))
        return ids

    def text(self, call: ScaledCall) -> str:
        """The prompt as printable characters, one for each token id.

        Raises UserError when the token range is not printable ASCII.
        """
        if not self.tokens.is_ascii_text:
            raise UserError(
                f"token range: {self.tokens.low}:{self.tokens.high} has ids that are no printable "
                "characters; text prompts need a range within 32:127"
            )
        return bytes(self.token_ids(call)).decode("ascii")

    def _block(self, block: int, count: int) -> Iterator[int]:
        # An extendable hash: a shorter block is a prefix of a longer one with the same id.
        raw = shake_128(f"{self.seed} {block}".encode()).digest(count * _HASH_BYTES_PER_TOKEN)
        width = self.tokens.high - self.tokens.low
        for at in range(0, len(raw), _HASH_BYTES_PER_TOKEN):
            word = int.from_bytes(raw[at : at + _HASH_BYTES_PER_TOKEN], "little")
            yield self.tokens.low + word % width


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Token counts of a scaled trace; means are per call, live sets in tokens."""

    sessions: int
    calls: int
    input_tokens: int
    max_input_tokens: int
    mean_input_tokens: float
    output_tokens: int
    max_output_tokens: int
    mean_output_tokens: float
    max_total_tokens: int
    unique_prompt_tokens: int
    best_prefix_hit_tokens: int
    concurrency: int
    mean_live_set_tokens: float
    max_live_set_tokens: int
    all_sessions_live_set_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """A few lines for a person."""
        return "\n".join(
            [
                f"{self.sessions} sessions, {self.calls} calls.",
                f"Input: {self.input_tokens:,} tokens, mean {self.mean_input_tokens:,.0f}, "
                f"max {self.max_input_tokens:,} a call.",
                f"Output: {self.output_tokens:,} tokens, mean {self.mean_output_tokens:,.1f}, "
                f"max {self.max_output_tokens:,} a call; input and output together at most "
                f"{self.max_total_tokens:,}.",
                f"Different prompt tokens: {self.unique_prompt_tokens:,}; an endless cache hits "
                f"{self.best_prefix_hit_tokens:,}.",
                f"Live set with {self.concurrency} sessions: mean "
                f"{self.mean_live_set_tokens:,.0f}, max {self.max_live_set_tokens:,} tokens; "
                f"with all sessions at their longest {self.all_sessions_live_set_tokens:,}.",
            ]
        )


def figures(sessions: tuple[ScaledSession, ...], scale: Scale, concurrency: int) -> TraceFigures:
    """Figures of `sessions`; the live set as if all calls took equally long."""
    calls = [call for session in sessions for call in session.calls]
    live = live_sets(sessions, scale, concurrency)
    longest = [max(s.calls, key=lambda call: call.input_tokens) for s in sessions]
    inputs = sum(call.input_tokens for call in calls)
    outputs = sum(call.output_tokens for call in calls)
    unique = _distinct_tokens(calls, scale)
    return TraceFigures(
        sessions=len(sessions),
        calls=len(calls),
        input_tokens=inputs,
        max_input_tokens=max(call.input_tokens for call in calls),
        mean_input_tokens=inputs / len(calls),
        output_tokens=outputs,
        max_output_tokens=max(call.output_tokens for call in calls),
        mean_output_tokens=outputs / len(calls),
        max_total_tokens=max(call.input_tokens + call.output_tokens for call in calls),
        unique_prompt_tokens=unique,
        best_prefix_hit_tokens=inputs - unique,
        concurrency=concurrency,
        mean_live_set_tokens=sum(live) / len(live),
        max_live_set_tokens=max(live),
        all_sessions_live_set_tokens=_distinct_tokens(longest, scale),
    )


def equal_pace(
    sessions: Sequence[ScaledSession], concurrency: int
) -> Iterator[list[tuple[int, ScaledCall]]]:
    """Rounds of calls, as `concurrency` sessions make them when all calls take equally long.

    A round has one call of each session that runs, with the session's place in `sessions`.
    """
    waiting = iter(range(len(sessions)))
    running: list[tuple[int, int]] = []
    while True:
        running.extend((place, 0) for place in islice(waiting, concurrency - len(running)))
        if not running:
            return
        yield [(place, sessions[place].calls[index]) for place, index in running]
        running = [
            (place, index + 1) for place, index in running if index + 1 < len(sessions[place].calls)
        ]


def live_sets(sessions: Sequence[ScaledSession], scale: Scale, concurrency: int) -> list[int]:
    """Different prompt tokens that the running sessions hold, round by round of `equal_pace`."""
    return [
        _distinct_tokens([call for _, call in calls], scale)
        for calls in equal_pace(sessions, concurrency)
    ]


def _distinct_tokens(calls: list[ScaledCall], scale: Scale) -> int:
    seen: set[int] = set()
    total = 0
    for call in calls:
        position = 0
        for position, block in enumerate(block_ids(call.blocks), start=1):
            if block not in seen:
                seen.add(block)
                total += scale.block_start(position) - scale.block_start(position - 1)
        if call.tail_block not in seen:
            seen.add(call.tail_block)
            total += call.input_tokens - scale.block_start(position)
    return total
