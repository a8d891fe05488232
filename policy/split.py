"""The pool split: equal reach of real bytes, approached from the safe side.

An offload pool that is too small loses prefixes, so it grows at once and in large steps, whatever
the window shows. Taking back blocks that it does not need is a saving: slow, only with traffic, and
only when HiSparse has no empty block left.

Where the policy asks for it, measured marginal value corrects equal reach: both pools keep a ghost
list of what they evicted, so the node knows the tokens that one more step would have served. The
target is never below equal reach; without ghost lists it is equal reach. Pure; moves no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hisparsed.policy import expectation
from hisparsed.policy.bounds import (
    SplitBounds,
    dead_band_blocks,
    reserve_blocks,
    shared_blocks,
    split_bounds,
    start_blocks,
    step_blocks,
)
from hisparsed.policy.decisions import Proposal, Reason
from hisparsed.policy.forecasts import Figures
from hisparsed.policy.guards import calm, without_traffic
from hisparsed.policy.memory import Direction, Memory, Window
from hisparsed.policy.reach import equal_reach_blocks, reach_at, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Snapshot
from hisparsed.policy.units import counted


@dataclass(frozen=True, slots=True)
class Gains:
    """Tokens per minute that one step more would have served, for each pool."""

    hisparse_per_min: float
    offload_per_min: float
    slack_per_min: float
    """Tokens at the far end of the offload pool's reach after giving a step away, which HiSparse
    has evicted and the offload pool still holds. None: it would be too small."""
    step_blocks: int

    def saved_per_min(self, blocks: int) -> float:
        """The saving expected from lending ``blocks`` more; negative blocks are taken back."""
        return (self.offload_per_min - self.hisparse_per_min) * blocks / self.step_blocks


@dataclass(frozen=True, slots=True)
class MarginalAim:
    blocks: int
    reason: Reason
    because: str


def gains(policy: Policy, snapshot: Snapshot, memory: Memory) -> Gains | None:
    """The measurements in the split's window; ``None`` before it is full."""
    hisparse = _per_min(memory.signals.split_hisparse_ghost_total, policy)
    offload = _per_min(memory.signals.split_offload_ghost_total, policy)
    deep = _per_min(memory.signals.split_hisparse_deep_total, policy)
    half = _per_min(memory.signals.split_hisparse_half_total, policy)
    if hisparse is None or offload is None or deep is None or half is None:
        return None
    step = step_blocks(snapshot.geometry, policy.rebalance.step)
    return Gains(hisparse, offload, deep - half, step)


def marginal_aim(
    policy: Policy, snapshot: Snapshot, measured: Gains, least_blocks: int
) -> MarginalAim:
    """One step towards the pool that serves more, not below ``least_blocks``."""
    current, settings = snapshot.offload.target_blocks, policy.rebalance.marginal
    step, noise = measured.step_blocks, 1 + settings.noise_margin
    hisparse, offload = measured.hisparse_per_min, measured.offload_per_min
    words = (
        f"{step} more blocks would have served {offload:.0f} tokens per minute in the offload pool "
        f"and {hisparse:.0f} in the HiSparse pool"
    )
    if abs(offload - hisparse) < max(1, settings.least_gain):
        because = f"{words}, which differ by under {settings.least_gain}"
        return MarginalAim(current, Reason.IN_DEAD_BAND, because)
    if offload > hisparse * noise:
        return MarginalAim(current + step, Reason.OFFLOAD_WORTH_MORE, words)
    if hisparse <= offload * noise:
        because = f"{words}, within the noise margin of {settings.noise_margin:.0%}"
        return MarginalAim(current, Reason.IN_DEAD_BAND, because)
    if measured.slack_per_min < settings.noise_margin * hisparse:
        because = f"{words}, but with {step} fewer blocks the offload pool would be too small"
        return MarginalAim(current, Reason.NO_BENEFIT, because)
    aim = max(least_blocks, current - step)
    if aim >= current:
        because = f"{words}, but equal reach needs at least {least_blocks} blocks"
        return MarginalAim(current, Reason.LIMITED_BY_FLOOR, because)
    return MarginalAim(aim, Reason.HISPARSE_WORTH_MORE, words)


def _per_min(window: Window, policy: Policy) -> float | None:
    rate = window.rate_per_s if window.full(policy.rebalance.window) else None
    return None if rate is None else rate * 60


PROBING = frozenset({Reason.OFFLOAD_WORTH_MORE, Reason.HISPARSE_WORTH_MORE})
"""Moves made on measured gains: slow in both directions, and judged by their saving."""


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where the law wants the offload target, and why."""

    blocks: int
    reason: Reason
    because: str
    measured: Gains | None = None


def propose_split(policy: Policy, snapshot: Snapshot, memory: Memory) -> Proposal:
    """The next offload target in host blocks with what that should bring, or the reason to
    keep it."""
    current = snapshot.offload.target_blocks
    bounds = split_bounds(policy, snapshot.geometry)
    need = _need(policy, snapshot, memory, policy.rebalance.margin)
    aim = _aim(policy, snapshot, memory, need)
    figures = _figures(policy, snapshot, memory, need, aim, bounds)

    def proposal(wanted: int, reason: Reason, limited_by: Reason | None, because: str) -> Proposal:
        return _proposal(policy, snapshot, wanted, reason, limited_by, figures, because)

    if bounds.clamp(current) != current:
        because = (
            f"{current} is outside the {bounds.low_blocks} ({bounds.low_words}) to "
            f"{bounds.high_blocks} ({bounds.high_words}) blocks that are allowed"
        )
        return proposal(bounds.clamp(current), Reason.OUTSIDE_BOUNDS, None, because)
    reserve = reserve_differs(policy, snapshot)
    if reserve is not None:
        return proposal(current, Reason.POLICY_VALUE, None, reserve)
    if aim.blocks == current:
        limited = aim.reason if aim.reason is Reason.LIMITED_BY_FLOOR else None
        return proposal(current, aim.reason, limited, aim.because)
    wanted, limited_by, limit = _limited(policy, snapshot, aim.blocks, bounds)
    if wanted == current and limited_by is not None:
        return proposal(current, limited_by, limited_by, limit)
    held = _held(policy, snapshot, memory, aim, wanted - current)
    if held is not None:
        return proposal(current, held[0], held[0], held[1])
    expected = _expected(policy, snapshot, aim, wanted)
    because = aim.because + expectation.words(expected)
    return replace(proposal(wanted, aim.reason, limited_by, because), expected=expected)


def reserve_differs(policy: Policy, snapshot: Snapshot) -> str | None:
    """In words, how the reserve in force differs from the policy's; ``None`` when it does not."""
    wanted, reserve = reserve_blocks(policy, snapshot.geometry), snapshot.reserve
    if wanted != reserve.target_blocks:
        pinned = wanted and policy.pools.release_reserve and not reserve.can_release
        kept = "; its memory stays with this node, which cannot give it back" if pinned else ""
        return f"the policy says {wanted} blocks, not {reserve.target_blocks}{kept}"
    releasing = policy.pools.release_reserve and reserve.can_release
    if releasing != reserve.releasing:
        return f"release_reserve is {str(releasing).lower()} now"
    return None


def _need(policy: Policy, snapshot: Snapshot, memory: Memory, margin: float) -> int:
    """Blocks for equal reach plus the margin, at the most demanding point of the window."""
    return equal_reach_blocks(
        snapshot.geometry,
        margin,
        int(memory.signals.split_in_use_blocks.low),
        int(memory.signals.split_in_flight_chunks.high),
        shared_blocks(policy, snapshot.geometry),
    )


def _aim(policy: Policy, snapshot: Snapshot, memory: Memory, need: int) -> _Aim:
    current, strategy = snapshot.offload.target_blocks, policy.rebalance.strategy
    if strategy == "fixed":
        start = start_blocks(policy, snapshot.geometry)
        reason = Reason.AT_TARGET if start == current else Reason.FIXED_SPLIT
        return _Aim(start, reason, f"the policy fixes {start} blocks for the offload pool")
    measured = gains(policy, snapshot, memory) if strategy == "marginal-value" else None
    if measured is None:
        aim = _equal_reach_aim(policy, snapshot, need)
        if strategy == "marginal-value":
            return replace(aim, because=f"{aim.because}; {_unmeasured(snapshot)}")
        return aim
    band = dead_band_blocks(policy, snapshot.geometry, need)
    safe = min(need, _need(policy, snapshot, memory, 0.0) + band)
    if current < safe:
        return _equal_reach_aim(policy, snapshot, need)
    marginal = marginal_aim(policy, snapshot, measured, safe + band)
    return _Aim(marginal.blocks, marginal.reason, marginal.because, measured)


def _unmeasured(snapshot: Snapshot) -> str:
    if snapshot.hisparse.ghost and snapshot.offload.ghost:
        return "what evicted prefixes would have served is not measured for a whole window yet"
    return "this node does not measure what evicted prefixes would have served"


def _equal_reach_aim(policy: Policy, snapshot: Snapshot, need: int) -> _Aim:
    current = snapshot.offload.target_blocks
    band = dead_band_blocks(policy, snapshot.geometry, need)
    margin = f"the HiSparse reach and a margin of {policy.rebalance.margin:.0%}"
    if current < need:
        because = f"{need} are needed for {margin}, and {current} are too few"
        return _Aim(need + band, Reason.OFFLOAD_SHORT_OF_REACH, because)
    if current > need + 2 * band:
        because = f"{need} are enough for {margin}, and {current} exceed the dead band above it"
        return _Aim(need + band, Reason.OFFLOAD_BEYOND_REACH, because)
    because = f"{need} to {need + 2 * band} blocks match {margin} within the dead band"
    return _Aim(current, Reason.IN_DEAD_BAND, because)


def _expected(policy: Policy, snapshot: Snapshot, aim: _Aim, wanted: int) -> Figures:
    if aim.measured is not None and aim.reason in PROBING:
        saved = aim.measured.saved_per_min(wanted - snapshot.offload.target_blocks)
        return expectation.expect_saved(saved)
    return expectation.expect_reach(policy, snapshot, wanted)


def _limited(
    policy: Policy, snapshot: Snapshot, aim: int, bounds: SplitBounds
) -> tuple[int, Reason | None, str]:
    """The target of one move on the way to ``aim``, the bound that limits it, and the words for
    it."""
    geometry, current = snapshot.geometry, snapshot.offload.target_blocks
    rebalance = policy.rebalance
    if aim > current:
        step = step_blocks(geometry, rebalance.step_towards_safety)
        keeps = max(snapshot.hisparse.in_use_blocks, snapshot.head_need_blocks)
        free_for_offload = max(current, shared_blocks(policy, geometry) - keeps)
        limits = (
            (
                bounds.high_blocks,
                bounds.high_reason,
                f"{bounds.high_words} allows at most {bounds.high_blocks} to be lent",
            ),
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
        (
            bounds.low_blocks,
            bounds.low_reason,
            f"{bounds.low_words} keeps at least {bounds.low_blocks} lent",
        ),
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
    policy: Policy, snapshot: Snapshot, memory: Memory, aim: _Aim, change_blocks: int
) -> tuple[Reason, str] | None:
    """Why a move that the law wants must not happen in this tick."""
    rebalance = policy.rebalance
    fixed, probing, grows = rebalance.strategy == "fixed", aim.reason in PROBING, change_blocks > 0
    hurried = grows and not probing
    if not hurried and not fixed:
        pointless = _pointless(policy, snapshot, memory, change_blocks)
        if pointless is not None:
            return pointless
    unsettled = snapshot.pending_blocks if grows else snapshot.draining_blocks
    if unsettled:
        state = "pending" if grows else "draining"
        are = "is" if unsettled == 1 else "are"
        return (
            Reason.SETTLING,
            f"{counted(unsettled, 'block')} of the last move {are} still {state}",
        )
    waiting = memory.expectations.get(Lever.SPLIT)
    if probing and waiting is not None and waiting.outcome is None:
        return Reason.SETTLING, "the result of the last move is not known yet"
    cool_down_s = rebalance.cool_down * expectation.doubt(policy, memory, Lever.SPLIT)
    if hurried:
        cool_down_s = rebalance.cool_down_towards_safety
    reason = calm(
        memory.split,
        Direction.SAFETY if hurried else Direction.THRIFT,
        snapshot.at_s,
        cool_down_s=cool_down_s,
        hold_off_s=0.0 if fixed or grows else rebalance.hold_off,
        back_off=rebalance.back_off,
    )
    if reason is None:
        return None
    since_s = memory.split.since_last_s(snapshot.at_s)
    words = {
        Reason.COOLING_DOWN: f"the last move was {since_s:.0f}s ago, under {cool_down_s:.0f}s",
        Reason.HOLD_OFF: "the offload pool was given blocks for safety under "
        f"{rebalance.hold_off:.0f}s ago",
        Reason.BACKED_OFF: f"{memory.split.undone} earlier moves were undone or gained too little",
    }
    return reason, words[reason]


def _pointless(
    policy: Policy, snapshot: Snapshot, memory: Memory, change_blocks: int
) -> tuple[Reason, str] | None:
    """Why a move that is not for safety would gain nothing, or cannot be known to."""
    tokens, span_s = memory.signals.split_tokens_total, policy.rebalance.window
    if not tokens.full(span_s):
        return Reason.WINDOW_NOT_FULL, f"{tokens.observed_s:.0f}s of {span_s:.0f}s are observed"
    idle = without_traffic(snapshot, memory)
    if idle is not None:
        return Reason.NO_TRAFFIC, idle
    if change_blocks < 0:
        empty, name = snapshot.hisparse.free_blocks, "HiSparse"
    else:
        offload = snapshot.offload
        empty_chunks = max(0, offload.capacity_chunks - offload.stored_chunks)
        empty, name = empty_chunks // snapshot.geometry.chunks_per_host_block, "offload"
    if empty >= abs(change_blocks):
        are = "is" if empty == 1 else "are"
        because = f"{counted(empty, 'host block')} of the {name} pool {are} still empty"
        return Reason.NO_BENEFIT, because
    return None


def _figures(
    policy: Policy,
    snapshot: Snapshot,
    memory: Memory,
    need: int,
    aim: _Aim,
    bounds: SplitBounds,
) -> dict[str, float]:
    geometry, reach = snapshot.geometry, reach_now(snapshot)
    then = reach_at(
        geometry,
        aim.blocks,
        snapshot.hisparse.in_use_blocks,
        snapshot.offload.in_use_chunks,
        shared_blocks(policy, geometry),
    )
    measured = {}
    if aim.measured is not None:
        measured = {
            "hisparse_gain_tokens_per_minute": aim.measured.hisparse_per_min,
            "offload_gain_tokens_per_minute": aim.measured.offload_per_min,
            "offload_slack_tokens_per_minute": aim.measured.slack_per_min,
            "gain_step_blocks": float(aim.measured.step_blocks),
        }
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
        "reserve_blocks": snapshot.reserve.blocks,
        "margin_ratio": policy.rebalance.margin,
        **measured,
        **expectation.figures(memory, Lever.SPLIT),
    }


def _proposal(
    policy: Policy,
    snapshot: Snapshot,
    wanted: int,
    reason: Reason,
    limited_by: Reason | None,
    figures: dict[str, float],
    because: str,
) -> Proposal:
    current = snapshot.offload.target_blocks
    reserve = reserve_blocks(policy, snapshot.geometry)
    if wanted != current:
        action = f"lend the offload pool {wanted} host blocks instead of {current}"
    elif reason.acts:
        action = f"keep {reserve} host blocks in reserve"
    else:
        action = f"keep {current} host blocks lent to the offload pool"
    return Proposal(Lever.SPLIT, current, wanted, reason, limited_by, figures, action, because)
