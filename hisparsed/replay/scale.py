"""Makes a trace smaller or larger and leaves out what the endpoint cannot hold.

Scaling keeps prefix relations: block k covers the tokens from floor(k x block x factor) to
floor((k + 1) x block x factor), so its place depends on k alone and calls that share n blocks share
the same prompt prefix. Think times are not scaled here.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from hisparsed.errors import UserError
from hisparsed.replay.model import BlockRun, Call, Trace


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
    """`trace` with token counts times `factor`, within `max_model_len` tokens a call.

    A call whose input leaves room for less than one output token is dropped rather than cut: a cut
    input would repeat a prefix that nobody sent. An output that does not fit is clipped.
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
