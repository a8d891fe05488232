"""Marginal value: which pool would serve more with the next host blocks, as measured.

Both pools keep a ghost list of what they evicted, so the node knows the tokens that one step
more would have served, counted only where the other pool held its part. It corrects the
equal-reach law where that assumes wrongly; it never goes below equal reach, and without
ghost lists equal reach stands. Says where to aim; guards and bounds are the split's.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.policy.bounds import step_blocks
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot
from hisparsed.policy.windows import Window


@dataclass(frozen=True, slots=True)
class Gains:
    """Tokens a minute that one step more would have served, a pool."""

    hisparse_per_min: float
    offload_per_min: float
    slack_per_min: float
    """Tokens that the HiSparse pool evicted about as long ago as the offload pool would reach
    back after giving a step away, and that it still holds. None: it would fall short."""
    step_blocks: int

    def saved_per_min(self, blocks: int) -> float:
        """What lending ``blocks`` more should save; they are taken back where negative."""
        return (self.offload_per_min - self.hisparse_per_min) * blocks / self.step_blocks


@dataclass(frozen=True, slots=True)
class MarginalAim:
    blocks: int
    reason: Reason
    because: str


def gains(policy: Policy, snapshot: Snapshot, memory: Memory) -> Gains | None:
    """What was measured in the split's window; ``None`` before it is full."""
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
        f"{step} blocks more would have served {offload:.0f} tokens a minute in the offload pool "
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
        because = f"{words}, but with {step} blocks less the offload pool would fall short itself"
        return MarginalAim(current, Reason.NO_BENEFIT, because)
    aim = max(least_blocks, current - step)
    if aim >= current:
        because = f"{words}, but equal reach is safe from {least_blocks} blocks on only"
        return MarginalAim(current, Reason.LIMITED_BY_FLOOR, because)
    return MarginalAim(aim, Reason.HISPARSE_WORTH_MORE, words)


def _per_min(window: Window, policy: Policy) -> float | None:
    rate = window.rate_per_s if window.full(policy.rebalance.window) else None
    return None if rate is None else rate * 60
