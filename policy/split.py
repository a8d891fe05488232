"""The pool split: equal reach of real bytes, approached from the safe side.

An offload pool that is short loses prefixes outright, so that is put right at once and in
large steps, whatever the window says. Taking back what it has too much of is thrift: slow,
only with traffic, and only when HiSparse has nothing empty left. Pure; moves no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.policy.bounds import (
    SplitBounds,
    dead_band_blocks,
    split_bounds,
    start_blocks,
    step_blocks,
)
from hisparsed.policy.decisions import Proposal
from hisparsed.policy.guards import calm
from hisparsed.policy.memory import Direction, Memory
from hisparsed.policy.reach import equal_reach_blocks, reach_at, reach_now
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where the law wants the offload target, and why."""

    blocks: int
    reason: Reason
    because: str


def propose_split(policy: Policy, snapshot: Snapshot, memory: Memory) -> Proposal:
    """The next offload target in host blocks, or the reason to keep it."""
    current = snapshot.offload.target_blocks
    bounds = split_bounds(policy, snapshot.geometry)
    need = _need(policy, snapshot, memory)
    aim = _aim(policy, snapshot, need)
    figures = _figures(policy, snapshot, need, aim, bounds)
    if bounds.clamp(current) != current:
        because = (
            f"{current} is outside the {bounds.low_blocks} to {bounds.high_blocks} blocks "
            "that floors and ceilings allow"
        )
        return _proposal(
            snapshot, bounds.clamp(current), Reason.OUTSIDE_BOUNDS, None, figures, because
        )
    if aim.blocks == current:
        return _proposal(snapshot, current, aim.reason, None, figures, aim.because)
    direction = Direction.SAFETY if aim.blocks > current else Direction.THRIFT
    wanted, limited_by, limit = _limited(policy, snapshot, aim.blocks, bounds)
    if wanted == current and limited_by is not None:
        return _proposal(snapshot, current, limited_by, limited_by, figures, limit)
    held = _held(policy, snapshot, memory, direction, current - wanted)
    if held is not None:
        return _proposal(snapshot, current, held[0], held[0], figures, held[1])
    return _proposal(snapshot, wanted, aim.reason, limited_by, figures, aim.because)


def _need(policy: Policy, snapshot: Snapshot, memory: Memory) -> int:
    """Blocks for equal reach plus the margin, at the most demanding point of the window."""
    return equal_reach_blocks(
        snapshot.geometry,
        policy.rebalance.margin,
        int(memory.signals.split_in_use_blocks.low),
        int(memory.signals.split_in_flight_chunks.high),
    )


def _aim(policy: Policy, snapshot: Snapshot, need: int) -> _Aim:
    current = snapshot.offload.target_blocks
    if policy.rebalance.strategy == "fixed":
        start = start_blocks(policy, snapshot.geometry)
        reason = Reason.AT_TARGET if start == current else Reason.FIXED_SPLIT
        return _Aim(start, reason, f"the policy fixes {start} blocks for the offload pool")
    band = dead_band_blocks(policy, snapshot.geometry, need)
    margin = f"the HiSparse reach and a margin of {policy.rebalance.margin:.0%}"
    if current < need:
        because = f"{need} are the fewest whose reach is {margin}, and {current} fall short"
        return _Aim(need + band, Reason.OFFLOAD_SHORT_OF_REACH, because)
    if current > need + 2 * band:
        because = f"{need} suffice for {margin}, and {current} are over the dead band above it"
        return _Aim(need + band, Reason.OFFLOAD_BEYOND_REACH, because)
    because = f"{need} to {need + 2 * band} blocks are {margin} within the dead band"
    return _Aim(current, Reason.IN_DEAD_BAND, because)


def _limited(
    policy: Policy, snapshot: Snapshot, aim: int, bounds: SplitBounds
) -> tuple[int, Reason | None, str]:
    """The part of the way to ``aim`` that one move may go, what cuts it, and in words."""
    geometry, current = snapshot.geometry, snapshot.offload.target_blocks
    rebalance = policy.rebalance
    if aim > current:
        step = step_blocks(geometry, rebalance.step_towards_safety)
        keeps = max(snapshot.hisparse.in_use_blocks, snapshot.head_need_blocks)
        free_for_offload = max(current, geometry.budget_blocks - keeps)
        limits = (
            (bounds.high_blocks, bounds.high_reason, f"at most {bounds.high_blocks} may be lent"),
            (
                free_for_offload,
                Reason.LIMITED_BY_IN_USE,
                f"{keeps} host blocks are in use or needed by the head of the queue",
            ),
            (current + step, Reason.LIMITED_BY_STEP, f"one move is at most {step} blocks"),
        )
        blocks, reason, words = min(limits, key=lambda limit: limit[0])
        return (aim, None, "") if aim <= blocks else (blocks, reason, words)
    step = step_blocks(geometry, rebalance.step)
    busy = -(-snapshot.offload.in_use_chunks // geometry.chunks_per_host_block)
    limits = (
        (bounds.low_blocks, bounds.low_reason, f"at least {bounds.low_blocks} must stay lent"),
        (
            min(current, busy),
            Reason.LIMITED_BY_IN_USE,
            f"{busy} lent blocks have transfers in flight",
        ),
        (current - step, Reason.LIMITED_BY_STEP, f"one move is at most {step} blocks"),
    )
    blocks, reason, words = max(limits, key=lambda limit: limit[0])
    return (aim, None, "") if aim >= blocks else (blocks, reason, words)


def _held(
    policy: Policy,
    snapshot: Snapshot,
    memory: Memory,
    direction: Direction,
    recalled_blocks: int,
) -> tuple[Reason, str] | None:
    """Why a move that the law wants must not happen in this tick."""
    rebalance, fixed = policy.rebalance, policy.rebalance.strategy == "fixed"
    safety = direction is Direction.SAFETY
    if not safety and not fixed:
        thrift = _thrift_pointless(policy, snapshot, memory, recalled_blocks)
        if thrift is not None:
            return thrift
    unsettled = snapshot.pending_blocks if safety else snapshot.draining_blocks
    if unsettled:
        state = "pending" if safety else "draining"
        return Reason.SETTLING, f"{unsettled} blocks of the last move are still {state}"
    cool_down_s = rebalance.cool_down_towards_safety if safety else rebalance.cool_down
    reason = calm(
        memory.split,
        direction,
        snapshot.at_s,
        cool_down_s=cool_down_s,
        hold_off_s=0.0 if fixed else rebalance.hold_off,
        back_off=rebalance.back_off,
    )
    if reason is None:
        return None
    since_s = memory.split.since_last_s(snapshot.at_s)
    words = {
        Reason.COOLING_DOWN: f"the last move was {since_s:.0f}s ago, under {cool_down_s:.0f}s",
        Reason.HOLD_OFF: "the offload pool was given blocks for safety under "
        f"{rebalance.hold_off:.0f}s ago",
        Reason.BACKED_OFF: f"{memory.split.undone} earlier moves this way had to be undone",
    }
    return reason, words[reason]


def _thrift_pointless(
    policy: Policy, snapshot: Snapshot, memory: Memory, recalled_blocks: int
) -> tuple[Reason, str] | None:
    requests, tokens = snapshot.requests, memory.signals.split_tokens_total
    span_s = policy.rebalance.window
    if not tokens.full(span_s):
        return Reason.WINDOW_NOT_FULL, f"{tokens.observed_s:.0f}s of {span_s:.0f}s are observed"
    if not (requests.running or requests.waiting) and tokens.high == tokens.low:
        return Reason.NOT_KV_PRESSURE, "nothing runs, waits or has run in the window"
    if snapshot.hisparse.free_blocks >= recalled_blocks:
        because = (
            f"{snapshot.hisparse.free_blocks} host blocks of the HiSparse pool are still empty"
        )
        return Reason.NO_BENEFIT, because
    return None


def _figures(
    policy: Policy, snapshot: Snapshot, need: int, aim: _Aim, bounds: SplitBounds
) -> dict[str, float]:
    geometry, reach = snapshot.geometry, reach_now(snapshot)
    then = reach_at(
        geometry, aim.blocks, snapshot.hisparse.in_use_blocks, snapshot.offload.in_use_chunks
    )
    return {
        "hisparse_reach_tokens": reach.hisparse_tokens,
        "offload_reach_tokens": reach.offload_tokens,
        "hisparse_reach_at_aim_tokens": then.hisparse_tokens,
        "offload_reach_at_aim_tokens": then.offload_tokens,
        "need_blocks": need,
        "aim_blocks": aim.blocks,
        "dead_band_blocks": dead_band_blocks(policy, geometry, need),
        "low_bound_blocks": bounds.low_blocks,
        "high_bound_blocks": bounds.high_blocks,
        "hisparse_in_use_blocks": snapshot.hisparse.in_use_blocks,
        "pending_blocks": snapshot.pending_blocks,
        "draining_blocks": snapshot.draining_blocks,
        "margin_ratio": policy.rebalance.margin,
    }


def _proposal(
    snapshot: Snapshot,
    wanted: int,
    reason: Reason,
    limited_by: Reason | None,
    figures: dict[str, float],
    because: str,
) -> Proposal:
    current = snapshot.offload.target_blocks
    if wanted == current:
        action = f"keep {current} host blocks lent to the offload pool"
    else:
        action = f"lend the offload pool {wanted} host blocks instead of {current}"
    return Proposal(Lever.SPLIT, current, wanted, reason, limited_by, figures, action, because)
