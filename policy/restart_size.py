"""The multiplier where only a restart changes it: the size that the next start should have.

With vLLM's own kernels every hot buffer has one size, from start to end, and rows are not counted
step by step. The known figures are the pressure on GPU blocks and vLLM's sampled counters, which
change once in some thousand steps, so rates are over minutes. This proposes a size instead of
steps, or reports which signal is missing.
"""

from __future__ import annotations

import math

from hisparsed.policy.bounds import (
    HotBounds,
    highest_multiplier,
    hot_bounds,
    hot_unit,
    lease_blocks,
)
from hisparsed.policy.decisions import Proposal, Reason
from hisparsed.policy.guards import Held, wait_is_no_shortage
from hisparsed.policy.memory import Memory, free_share, under_gpu_pressure
from hisparsed.policy.multiplier import PESSIMISM, propose_multiplier
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Snapshot
from hisparsed.policy.units import format_bytes

LEAST_SAMPLED_S = 120.0
"""vLLM samples once in 2,000 worker steps: about that long at 60 ms a step."""


def propose_restart_size(policy: Policy, snapshot: Snapshot, memory: Memory) -> Proposal:
    """Acting reasons come out as ``PendingRestart``: the lever is not live."""
    bounds = hot_bounds(policy, snapshot.geometry)
    lease = lease_blocks(snapshot.geometry, snapshot.hot.multiplier)
    if bounds.clamp(lease) != lease:
        return propose_multiplier(policy, snapshot, memory)[0]
    figures = _figures(policy, snapshot, memory, lease)
    no_shortage = wait_is_no_shortage(policy, snapshot, memory)
    if under_gpu_pressure(policy, snapshot):
        found = no_shortage or _smaller(policy, snapshot, memory, lease, bounds)
        reason = Reason.GPU_POOL_PRESSURE
        because = (
            f"requests were short of GPU blocks for {policy.hot.window_shrink:g}s and, by vLLM's "
            "sampled counters, the misses expected then fit the PCIe budget"
        )
    elif free_share(snapshot) >= policy.hot.free_high and not snapshot.requests.waiting:
        found = _larger(policy, snapshot, memory, lease)
        reason = Reason.ROOM_TO_GROW
        because = (
            f"{free_share(snapshot):.0%} of GPU blocks are free, no request waited in the last "
            f"{policy.hot.window_grow:g}s and vLLM's sampled counters show missed rows"
        )
    else:
        words = f"{free_share(snapshot):.0%} of GPU blocks are free"
        found = no_shortage or (Reason.IN_DEAD_BAND, words)
        reason, because = Reason.IN_DEAD_BAND, ""
    current = snapshot.hot.multiplier
    if isinstance(found, tuple):
        held, why = found
        limited_by = held if held.value.startswith("Limited") else None
        action = f"keep the multiplier at {current:g}x"
        return Proposal(Lever.MULTIPLIER, current, current, held, limited_by, figures, action, why)
    wanted = found * hot_unit(snapshot.geometry)
    action = f"start with {wanted:g}x (hot.start) instead of {current:g}x"
    return Proposal(Lever.MULTIPLIER, current, wanted, reason, None, figures, action, because)


def sampled_bytes_per_s(memory: Memory) -> float | None:
    """Bytes of missed rows per second and GPU; ``None`` before there are enough samples."""
    window = memory.signals.sampled_bytes_total
    return window.rate_per_s if window.observed_s >= LEAST_SAMPLED_S else None


def _smaller(
    policy: Policy, snapshot: Snapshot, memory: Memory, lease: int, bounds: HotBounds
) -> int | Held:
    """Blocks of a lease with which the waiting requests could run, if their misses fit."""
    span_s = policy.hot.window_shrink
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    if lease == bounds.min_blocks:
        return Reason.LIMITED_BY_FLOOR, "GPU blocks are short but the multiplier is at its minimum"
    pressure = memory.signals.shrink_pressure
    if not pressure.full(span_s) or not pressure.low:
        return Reason.WINDOW_NOT_FULL, f"GPU blocks were not short for all of {span_s:g}s"
    rate = sampled_bytes_per_s(memory)
    if rate is None:
        return _no_samples(memory)
    gpu, requests = snapshot.gpu, snapshot.requests
    used = gpu.total_blocks - gpu.free_blocks
    needed = requests.waiting * used / max(1, requests.running) - gpu.free_blocks
    fewer = math.ceil(needed / (snapshot.geometry.hot_groups * max(1, requests.running)))
    wanted = max(bounds.min_blocks, lease - max(bounds.step_blocks, fewer))
    if rate > 0:
        # The largest ratio of sizes at which the misses still fit.
        fits = (policy.hot.pcie_budget / rate) ** (1 / PESSIMISM)
        wanted = max(wanted, math.ceil(lease / max(fits, 1.0)))
    if wanted >= lease:
        return Reason.LIMITED_BY_PCIE, (
            f"the misses sampled, {format_bytes(round(rate))}/s, leave no room for more within the "
            f"PCIe budget of {format_bytes(round(policy.hot.pcie_budget))}/s"
        )
    return wanted


def _larger(policy: Policy, snapshot: Snapshot, memory: Memory, lease: int) -> int | Held:
    """Blocks of a lease with which half-way between the thresholds would stay free."""
    hot, signals, geometry = policy.hot, memory.signals, snapshot.geometry
    span_s, running = hot.window_grow, snapshot.requests.running
    if not running:
        return Reason.NO_TRAFFIC, "no request runs"
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    calm_window = signals.grow_free_share.low >= hot.free_high and not signals.grow_waiting.high
    if not signals.grow_free_share.full(span_s) or not calm_window:
        return Reason.WINDOW_NOT_FULL, f"there was not room for all of {span_s:g}s"
    rate = sampled_bytes_per_s(memory)
    if rate is None:
        return _no_samples(memory)
    if not rate:
        return Reason.NO_BENEFIT, "no row was missed in vLLM's samples"
    # Not limited by the lease of vLLM's present tables: a restart creates new ones.
    most = math.floor(highest_multiplier(policy, geometry.decode_query_len) / hot_unit(geometry))
    least_free = (hot.free_low + hot.free_high) / 2 * snapshot.gpu.total_blocks
    spare = math.floor((snapshot.gpu.free_blocks - least_free) / (geometry.hot_groups * running))
    if lease >= most:
        return Reason.LIMITED_BY_CEILING, "there is room but the multiplier is at its maximum"
    if spare < 1:
        return Reason.LIMITED_BY_IN_USE, f"larger leases would leave under {least_free:.0f} free"
    return min(most, lease + spare)


def _no_samples(memory: Memory) -> Held:
    seen_s = memory.signals.sampled_bytes_total.observed_s
    return Reason.MISSING_SIGNAL, (
        f"vLLM's sampled counters of missed rows were seen for {seen_s:.0f}s, and "
        f"{LEAST_SAMPLED_S:g}s are needed"
    )


def _leasing(snapshot: Snapshot) -> int:
    return snapshot.requests.mixed + snapshot.requests.none


def _figures(policy: Policy, snapshot: Snapshot, memory: Memory, lease: int) -> dict[str, float]:
    figures = {
        "gpu_free_ratio": free_share(snapshot),
        "gpu_waiting": float(snapshot.gpu.waiting_for_blocks),
        "waiting_requests": snapshot.requests.waiting,
        "leasing_requests": _leasing(snapshot),
        "lease_blocks": lease,
        "pcie_budget_bytes_per_s": policy.hot.pcie_budget,
    }
    rate = sampled_bytes_per_s(memory)
    return figures if rate is None else figures | {"sampled_bytes_per_s": rate}
