"""The expected gain of a move of the split, and whether it was reached.

Reach for moves of the equal-reach law, tokens of prefix per minute for marginal value. A move
that did not bring half of it makes the next ones wait longer. Pure; decides no move.
"""

from __future__ import annotations

from dataclasses import replace

from hisparsed.policy.bounds import shared_blocks
from hisparsed.policy.memory import Expectation, Memory, Window
from hisparsed.policy.reach import reach_at, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot

REACH, SAVED = "reach_tokens", "saved_tokens_per_minute"
_ENOUGH = 0.5
"""Share of what was expected that makes a move effective; half, as hit rates are noisy."""
_JUDGE_ANYWAY = 4.0
"""Windows after which a move that has not settled is judged by what it brought."""
_EFFECTIVE_MEMORY_S = 3600.0


def expect_reach(policy: Policy, snapshot: Snapshot, to_blocks: int) -> Expectation:
    """What the equal-reach law expects; nothing or less where it only restores its margin."""
    now = snapshot.offload.target_blocks
    gained = _min_reach(policy, snapshot, to_blocks) - _min_reach(policy, snapshot, now)
    return Expectation(snapshot.at_s, REACH, gained, now, to_blocks)


def expect_saved(
    snapshot: Snapshot, memory: Memory, to_blocks: int, saved_per_min: float
) -> Expectation:
    """The expectation of marginal value."""
    return Expectation(
        snapshot.at_s,
        SAVED,
        saved_per_min,
        snapshot.offload.target_blocks,
        to_blocks,
        hit_ratio_before=_hit_ratio(memory),
    )


def words(expected: Expectation) -> str:
    """The end of a sentence; empty where there is nothing to expect."""
    if expected.expected <= 0:
        return ""
    if expected.unit == REACH:
        return f"; that should add {expected.expected:.0f} tokens of reach"
    return f"; that should save {expected.expected:.0f} tokens of prefix per minute"


def followed_by(old: Expectation | None, new: Expectation) -> Expectation | None:
    """Steps of one way that follow each other before they are judged are judged as one.

    ``None`` where there is nothing to judge.
    """
    merged = _merged(old, new)
    return merged if merged.expected > 0 else None


def _merged(old: Expectation | None, new: Expectation) -> Expectation:
    if old is None or old.realised is not None or old.unit != new.unit:
        return new
    if (old.to_blocks > old.from_blocks) != (new.to_blocks > new.from_blocks):
        return new
    return replace(
        new,
        from_blocks=old.from_blocks,
        expected=old.expected + new.expected,
        hit_ratio_before=old.hit_ratio_before,
    )


def judge_move(policy: Policy, snapshot: Snapshot, memory: Memory) -> Memory:
    """Memory with the verdict on the last move, once it has settled and a window has passed."""
    waiting = memory.expectation
    if waiting is None or waiting.realised is not None:
        return memory
    window_s, since_s = policy.rebalance.window, snapshot.at_s - waiting.at_s
    settled = not (snapshot.pending_blocks or snapshot.draining_blocks)
    if since_s < window_s or (not settled and since_s < _JUDGE_ANYWAY * window_s):
        return memory
    realised = _realised(policy, snapshot, memory, waiting)
    if realised is None:
        return replace(memory, expectation=None)
    effective = realised >= _ENOUGH * waiting.expected
    at_s = snapshot.at_s
    return replace(
        memory,
        expectation=replace(waiting, realised=realised, judged_at_s=at_s),
        effective=memory.effective.push(at_s, effective, _EFFECTIVE_MEMORY_S, float("inf")),
        split=memory.split if effective else memory.split.disappointed(at_s),
    )


def verdict(snapshot: Snapshot, memory: Memory) -> str:
    """The end of a sentence in the tick in which a move is judged; empty otherwise."""
    judged = memory.expectation
    if judged is None or judged.realised is None or judged.judged_at_s != snapshot.at_s:
        return ""
    unit = "tokens of reach" if judged.unit == REACH else "tokens of prefix per minute"
    return (
        f"; the move from {judged.from_blocks} to {judged.to_blocks} was expected to add "
        f"{judged.expected:.0f} {unit} and brought {judged.realised:.0f}"
    )


def figures(memory: Memory) -> dict[str, float]:
    """The last move's ``expected_...`` and ``realised_...``, and how many came true."""
    found: dict[str, float] = {}
    last = memory.expectation
    if last is not None:
        found[f"expected_{last.unit}"] = last.expected
        if last.realised is not None:
            found[f"realised_{last.unit}"] = last.realised
    if memory.effective.value is not None:
        found["effective_moves_ratio"] = memory.effective.value
    return found


def _realised(
    policy: Policy, snapshot: Snapshot, memory: Memory, moved: Expectation
) -> float | None:
    if moved.unit == REACH:
        # Against the old split under today's load: what runs now is no merit of the move.
        there = reach_now(snapshot).min_tokens
        return float(there - _min_reach(policy, snapshot, moved.from_blocks))
    ratio, asked = _hit_ratio(memory), memory.signals.split_query_total.rate_per_s
    if ratio is None or moved.hit_ratio_before is None or asked is None:
        return None
    return (ratio - moved.hit_ratio_before) * asked * 60


def _min_reach(policy: Policy, snapshot: Snapshot, offload_blocks: int) -> int:
    geometry = snapshot.geometry
    return reach_at(
        geometry,
        offload_blocks,
        snapshot.hisparse.in_use_blocks,
        snapshot.offload.in_use_chunks,
        shared_blocks(policy, geometry),
    ).min_tokens


def _hit_ratio(memory: Memory) -> float | None:
    asked: Window = memory.signals.split_query_total
    return memory.signals.split_hit_total.rise / asked.rise if asked.rise else None
