"""The multiplier: hot rows of the next leases, in whole hot blocks.

Shrinks under GPU-pool pressure as long as the predicted miss traffic fits the PCIe budget,
and grows back with room. Shrinking is the safe direction: it lets requests run. Running
requests keep the lease they have, so each move needs a window of its own to show.
"""

from __future__ import annotations

from hisparsed.policy.bounds import HotBounds, hot_bounds, hot_unit, lease_blocks
from hisparsed.policy.decisions import Proposal
from hisparsed.policy.guards import calm, pace
from hisparsed.policy.memory import Direction, Memory, free_share, under_gpu_pressure
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot

PESSIMISM = 1.5
"""Exponent of the miss estimate. Measured misses rise a little less than in proportion when
a buffer shrinks (13 % at 2x, 7 % at 4x top-k); 1.5 overstates that on purpose."""


def propose_multiplier(policy: Policy, snapshot: Snapshot, memory: Memory) -> Proposal:
    """The multiplier of the next lease, or the reason to keep it."""
    bounds = hot_bounds(policy, snapshot.geometry)
    lease = lease_blocks(snapshot.geometry, snapshot.hot.multiplier)
    shrunk = max(bounds.min_blocks, lease - bounds.step_blocks)
    predicted = predicted_bytes_per_s(snapshot, memory, shrunk)
    figures = _figures(policy, snapshot, memory, predicted, lease)
    if bounds.clamp(lease) != lease:
        unit = hot_unit(snapshot.geometry)
        because = f"the range is {bounds.min_blocks * unit:g}x to {bounds.max_blocks * unit:g}x"
        return _proposal(snapshot, bounds.clamp(lease), Reason.OUTSIDE_BOUNDS, figures, because)
    if under_gpu_pressure(policy, snapshot):
        held = _shrink_held(policy, snapshot, memory, lease, bounds, predicted)
        wanted, reason = shrunk, Reason.GPU_POOL_PRESSURE
        because = (
            f"requests were short of GPU blocks for {policy.hot.window_shrink:g}s and the misses "
            f"expected then, {predicted:.3g} B/s, fit the PCIe budget"
        )
    elif free_share(snapshot) >= policy.hot.free_high and not snapshot.requests.waiting:
        held = _grow_held(policy, snapshot, memory, lease, bounds)
        wanted, reason = min(bounds.max_blocks, lease + bounds.step_blocks), Reason.ROOM_TO_GROW
        because = (
            f"{free_share(snapshot):.0%} of GPU blocks are free, nobody has waited for "
            f"{policy.hot.window_grow:g}s and rows are still missed"
        )
    else:
        held = (Reason.IN_DEAD_BAND, f"{free_share(snapshot):.0%} of GPU blocks are free")
        wanted, reason, because = lease, Reason.IN_DEAD_BAND, ""
    if held is not None:
        return _proposal(snapshot, lease, held[0], figures, held[1])
    return _proposal(snapshot, wanted, reason, figures, because)


def predicted_bytes_per_s(snapshot: Snapshot, memory: Memory, lease: int) -> float:
    """Host-to-GPU bytes a second if the next leases were ``lease`` blocks.

    The node's own miss curve is used where it reaches; else measured loads are scaled by
    (current / new) ** ``PESSIMISM``. Never above what missing every host row would cost.
    """
    signals, hot = memory.signals, snapshot.hot
    span_s = signals.shrink_loads_total.observed_s
    if span_s <= 0:
        return 0.0
    bytes_total, loads_total = signals.shrink_h2d_bytes_total, signals.shrink_loads_total
    references = signals.shrink_references_total
    moved = bytes_total.high - bytes_total.low
    loads = loads_total.high - loads_total.low
    asked = max(loads, references.high - references.low)
    bytes_a_row = moved / loads if loads else float(snapshot.geometry.row_bytes)
    multiplier = lease * hot_unit(snapshot.geometry)
    covering = [point for point in hot.predicted if point.multiplier <= multiplier]
    if covering:
        nearest = max(covering, key=lambda point: point.multiplier)
        return nearest.miss_fraction * asked * bytes_a_row / span_s
    ratio = max(1.0, hot.multiplier / multiplier)
    return float(min(asked, loads * ratio**PESSIMISM)) * bytes_a_row / span_s


def _shrink_held(
    policy: Policy,
    snapshot: Snapshot,
    memory: Memory,
    lease: int,
    bounds: HotBounds,
    predicted: float,
) -> tuple[Reason, str] | None:
    span_s = policy.hot.window_shrink
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    if lease == bounds.min_blocks:
        return Reason.LIMITED_BY_FLOOR, "GPU blocks are short but the multiplier is at its least"
    waits = _calm(policy, snapshot, memory, Direction.SAFETY, span_s)
    if waits is not None:
        return waits
    pressure = memory.signals.shrink_pressure
    if not pressure.full(span_s) or not pressure.low:
        return Reason.WINDOW_NOT_FULL, f"GPU blocks were not short for all of {span_s:g}s"
    if predicted > policy.hot.pcie_budget:
        because = (
            f"the misses expected with less, {predicted:.3g} B/s, exceed the PCIe budget of "
            f"{policy.hot.pcie_budget:.3g} B/s"
        )
        return Reason.LIMITED_BY_PCIE, because
    return None


def _grow_held(
    policy: Policy, snapshot: Snapshot, memory: Memory, lease: int, bounds: HotBounds
) -> tuple[Reason, str] | None:
    hot, signals = policy.hot, memory.signals
    span_s = hot.window_grow
    if lease == bounds.max_blocks:
        return Reason.LIMITED_BY_CEILING, "there is room but the multiplier is at its most"
    if not snapshot.requests.running:
        return Reason.NOT_KV_PRESSURE, "nothing runs"
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    waits = _calm(policy, snapshot, memory, Direction.THRIFT, span_s)
    if waits is not None:
        return waits
    calm_window = signals.grow_free_share.low >= hot.free_high and not signals.grow_waiting.high
    if not signals.grow_free_share.full(span_s) or not calm_window:
        return Reason.WINDOW_NOT_FULL, f"there was not room for all of {span_s:g}s"
    if signals.grow_loads_total.high == signals.grow_loads_total.low:
        return Reason.NO_BENEFIT, "no row was missed in the window"
    step = min(bounds.max_blocks, lease + bounds.step_blocks) - lease
    taken = step * snapshot.geometry.hot_groups * snapshot.requests.running
    # Half-way between the thresholds, or growing would bring back what shrinking cured.
    least_free = (hot.free_low + hot.free_high) / 2 * snapshot.gpu.total_blocks
    if snapshot.gpu.free_blocks - taken < least_free:
        because = f"{taken} more blocks would leave fewer than {least_free:.0f} free"
        return Reason.LIMITED_BY_IN_USE, because
    return None


def _calm(
    policy: Policy, snapshot: Snapshot, memory: Memory, direction: Direction, span_s: float
) -> tuple[Reason, str] | None:
    back_off = policy.rebalance.back_off
    reason = calm(
        memory.multiplier,
        direction,
        snapshot.at_s,
        cool_down_s=span_s,
        hold_off_s=0.0,
        back_off=back_off,
    )
    if reason is None:
        return None
    wait_s = span_s
    if reason is Reason.BACKED_OFF:
        wait_s *= pace(memory.multiplier, back_off)
    since_s = memory.multiplier.since_last_s(snapshot.at_s)
    return reason, f"the last change was {since_s:.0f}s ago, under {wait_s:.0f}s"


def _leasing(snapshot: Snapshot) -> int:
    """Running requests with a hot buffer: all whose pages are not all on the GPU."""
    return snapshot.requests.mixed + snapshot.requests.none


def _figures(
    policy: Policy, snapshot: Snapshot, memory: Memory, predicted: float, lease: int
) -> dict[str, float]:
    loads = memory.signals.shrink_loads_total
    observed_s = loads.observed_s
    return {
        "gpu_free_ratio": free_share(snapshot),
        "gpu_waiting": float(snapshot.gpu.waiting_for_blocks),
        "waiting_requests": snapshot.requests.waiting,
        "leasing_requests": _leasing(snapshot),
        "lease_blocks": lease,
        "loads_per_s": (loads.high - loads.low) / observed_s if observed_s > 0 else 0.0,
        "predicted_bytes_per_s": predicted,
        "pcie_budget_bytes_per_s": policy.hot.pcie_budget,
    }


def _proposal(
    snapshot: Snapshot, wanted_blocks: int, reason: Reason, figures: dict[str, float], because: str
) -> Proposal:
    current = snapshot.hot.multiplier
    held = wanted_blocks == lease_blocks(snapshot.geometry, current)
    wanted = current if held else wanted_blocks * hot_unit(snapshot.geometry)
    if held:
        action = f"keep the multiplier at {current:g}x"
    else:
        action = f"lease {wanted:g}x top-k instead of {current:g}x from now on"
    limited_by = reason if reason.value.startswith("Limited") else None
    return Proposal(Lever.MULTIPLIER, current, wanted, reason, limited_by, figures, action, because)
