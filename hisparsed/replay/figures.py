"""How large a scaled trace is: what an operator needs to size a node or a replay for it.

Counts tokens as they would be sent. A live set here is what `concurrency` sessions hold at one
moment, each counted with the prompt of its current call, shared blocks once.
"""

from dataclasses import asdict, dataclass
from typing import Any

from hisparsed.replay.model import block_ids
from hisparsed.replay.scale import Scale, ScaledCall, ScaledSession


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
    live = _live_sets(sessions, scale, concurrency)
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


def _live_sets(sessions: tuple[ScaledSession, ...], scale: Scale, concurrency: int) -> list[int]:
    waiting = list(reversed(sessions))
    running: list[list[ScaledCall]] = []
    live = []
    while running or waiting:
        while waiting and len(running) < concurrency:
            running.append(list(reversed(waiting.pop().calls)))
        live.append(_distinct_tokens([calls[-1] for calls in running], scale))
        for calls in running:
            calls.pop()
        running = [calls for calls in running if calls]
    return live
