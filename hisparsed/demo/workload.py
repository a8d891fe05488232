"""The load of the demo: recorded sessions, how many at a time, and how many calls.

It follows from fixed rules, the node's size and the speed of the first calls, never from the result
of a node. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise

from hisparsed.errors import UserError
from hisparsed.replay.plan import choose_sessions, limit_calls
from hisparsed.replay.scaled_trace import (
    Scale,
    ScaledCall,
    ScaledSession,
    equal_pace,
    live_sets,
    scale_trace,
)
from hisparsed.replay.trace import BlockRun, Trace, block_ids

SCALE = Fraction(1, 64)
"""Token counts of the trace are multiplied by it: a CPU computes about 1,000 tokens per second."""
SESSION_CALLS = 8
"""Calls of a session that are sent. Contexts grow with each call, so longer sessions would be a
heavier load on a fast machine, which completes more of them."""
DEFAULT_LOAD = 1.5
"""Live set / reach: moderately over-subscribed."""
_MOST_SESSIONS = 60
_PASSES = 10
"""Times that the trace can be sent, each time with different prompts."""

TOKENS_A_CALL = 20
TOKENS_AN_OUTPUT = 6
"""The cost of a call and of one token of its answer, in tokens of prefill: HTTP and scheduling, and
a share of a decode step. About right on CPUs from slow to fast."""


@dataclass(frozen=True)
class Workload:
    """``concurrency`` sessions at a time out of ``sessions``, more than any run sends."""

    sessions: tuple[ScaledSession, ...]
    scale: Scale
    concurrency: int
    live_set_tokens: int
    reach_tokens: int

    @property
    def load(self) -> float:
        """Live set / reach."""
        return self.live_set_tokens / self.reach_tokens

    @property
    def first_calls(self) -> tuple[ScaledSession, ...]:
        """The first call of each session that begins at once: no pool can serve any of it."""
        return limit_calls(self.sessions, self.concurrency, self.concurrency)

    def after_first(self, calls: int) -> tuple[ScaledSession, ...]:
        """``calls`` calls that follow ``first_calls``."""
        begun = self.concurrency
        sessions = limit_calls(self.sessions, begun, begun + calls)
        rest = [replace(one, calls=one.calls[1:]) for one in sessions[:begun]]
        return tuple(one for one in (*rest, *sessions[begun:]) if one.calls)


def make_workload(
    trace: Trace,
    *,
    reach_tokens: int,
    max_model_len: int,
    seed: int,
    load: float = DEFAULT_LOAD,
    concurrency: int | None = None,
) -> Workload:
    """The number of sessions at a time with which the live set is nearest to ``load`` times the
    reach.

    ``concurrency`` overrules ``load``. Raises ``UserError`` for an impossible load.
    """
    scaled = scale_trace(trace, SCALE, max_model_len)
    sessions = tuple(
        replace(one, calls=one.calls[:SESSION_CALLS])
        for one in choose_sessions(scaled, len(scaled.sessions), seed)
    )
    wanted = load * reach_tokens

    def live_set(count: int) -> float:
        # The end, where sessions run out, belongs to the next pass.
        sizes = live_sets(sessions, scaled.scale, count)[:-SESSION_CALLS]
        return sum(sizes) / len(sizes)

    counts = range(1, _MOST_SESSIONS + 1)
    if concurrency is None:
        place = bisect_left(counts, wanted, key=live_set)
        if place == len(counts):
            most = math.floor(live_set(_MOST_SESSIONS) / reach_tokens * 10) / 10
            raise UserError(
                f"--load: {load:g} is more than {_MOST_SESSIONS} sessions make; need at most {most}"
            )
        near = counts[max(0, place - 1) : place + 1]
        concurrency = min(near, key=lambda count: abs(live_set(count) - wanted))
    return Workload(
        tuple(chain.from_iterable(_again(sessions, number) for number in range(_PASSES))),
        scaled.scale,
        concurrency,
        round(live_set(min(concurrency, _MOST_SESSIONS))),
        reach_tokens,
    )


def _again(sessions: tuple[ScaledSession, ...], number: int) -> Iterable[ScaledSession]:
    """The sessions with other prompts, which share prefixes among themselves as before."""
    if number == 0:
        return sessions
    runs = [run for one in sessions for call in one.calls for run in call.blocks]
    tails = [call.tail_block for one in sessions for call in one.calls]
    offset = number * (1 + max([*tails, *(run.first + run.count for run in runs)]))

    def moved(call: ScaledCall) -> ScaledCall:
        blocks = tuple(BlockRun(run.first + offset, run.count) for run in call.blocks)
        return replace(call, blocks=blocks, tail_block=call.tail_block + offset)

    return (
        replace(one, id=f"{one.id} {number + 1}", calls=tuple(map(moved, one.calls)))
        for one in sessions
    )


def work_of(calls: Iterable[ScaledCall]) -> int:
    """The cost of ``calls`` without any held prefix, in tokens of prefill."""
    return sum(call.input_tokens + _beside_prompt(call) for call in calls)


def _beside_prompt(call: ScaledCall) -> int:
    return TOKENS_A_CALL + TOKENS_AN_OUTPUT * call.output_tokens


def calls_within(workload: Workload, work: float) -> int:
    """How many calls after the first ones cost ``work`` tokens of prefill with the policy off.

    The order is that of arrival, and prompts are held by recency, up to the reach.
    """
    held: OrderedDict[int, int] = OrderedDict()
    room = workload.reach_tokens
    rounds = equal_pace(workload.sessions, workload.concurrency)
    calls = (call for one_round in rounds for _, call in one_round)
    number = 0
    for number, call in enumerate(calls):
        blocks = list(_block_sizes(call, workload.scale))
        missing = len(blocks)
        for place, (block, _) in enumerate(blocks):
            if block not in held:
                missing = place
                break
        computed = call.input_tokens - sum(size for _, size in blocks[:missing])
        if number >= workload.concurrency:
            work -= computed + _beside_prompt(call)
        if work < 0:
            break
        for block, size in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = size
                room -= size
        while room < 0:
            room += held.popitem(last=False)[1]
    return max(0, number - workload.concurrency)


def _block_sizes(call: ScaledCall, scale: Scale) -> Iterable[tuple[int, int]]:
    starts = pairwise(scale.block_start(place) for place in range(1 << 30))
    for block, (start, end) in zip(block_ids(call.blocks), starts, strict=False):
        yield block, end - start
