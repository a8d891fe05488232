"""The multiplier: hot rows of a request, in whole hot blocks, and the gain of another size.

Shrinks when requests wait for GPU blocks, as long as the predicted miss traffic fits the PCIe
budget and more requests at a time save more than those misses cost. Grows back with room, or where
fewer misses save more. Shrinking is the safe direction: it lets requests run.

Gain and cost are seconds of the node's time over one window. Smaller buffers let more requests
share the time of steps that only decode, but each of them waits longer for rows; steps with prefill
are not shared. Between changes ``sharing`` may divide the same budget by each request's own miss
curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hisparsed.policy import expectation
from hisparsed.policy.bounds import HotBounds, hot_bounds, hot_unit, lease_blocks
from hisparsed.policy.decisions import Proposal, Reason
from hisparsed.policy.forecasts import Figure, Figures
from hisparsed.policy.guards import Held, calm, core_busy, pace, step_fill, wait_is_no_shortage
from hisparsed.policy.memory import Direction, Memory, free_share, under_gpu_pressure
from hisparsed.policy.schema import Policy
from hisparsed.policy.sharing import propose_sharing
from hisparsed.policy.signals import Lever, MissPoint, Snapshot
from hisparsed.policy.units import format_bytes

WORTH_MARGIN = 0.25
"""The margin by which one side must exceed the other: a dead band against oscillation."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds of the window that other leases would save and cost."""

    saved_s: float
    cost_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s > (1 + WORTH_MARGIN) * self.cost_s


def shrinking(policy: Policy, snapshot: Snapshot, memory: Memory, to_blocks: int) -> Worth | None:
    """Leases of ``to_blocks``, fewer than now; ``None`` where the node does not report its times.

    Blocks that are freed let no more requests run than wait.
    """
    times = _times(policy, memory)
    freed = _share_of_blocks(snapshot, to_blocks)
    if times is None or freed is None:
        return None
    decode_s, rows_s = times
    requests = snapshot.requests
    more = min(-freed, requests.waiting / (requests.running + requests.waiting))
    return Worth(decode_s * more, rows_s * (_misses_then(snapshot, to_blocks, 1.5) - 1))


def growing(policy: Policy, snapshot: Snapshot, memory: Memory, to_blocks: int) -> Worth | None:
    """Leases of ``to_blocks``, more than now, while requests wait for blocks.

    ``None`` too where the node predicts no misses.
    """
    times = _times(policy, memory)
    taken = _share_of_blocks(snapshot, to_blocks)
    if times is None or taken is None or not snapshot.hot.predicted:
        return None
    decode_s, rows_s = times
    return Worth(rows_s * (1 - _misses_then(snapshot, to_blocks, 0.0)), decode_s * taken)


def _times(policy: Policy, memory: Memory) -> tuple[float, float] | None:
    """Seconds in steps that only decode, rows skipped, and seconds of reading rows."""
    decode = memory.signals.grow_decode_seconds
    if not decode.observed_s:
        return None
    rows_s = memory.signals.grow_h2d_bytes_total.rise / policy.hot.row_rate
    return max(0.0, decode.rise - rows_s), rows_s


def _share_of_blocks(snapshot: Snapshot, to_blocks: int) -> float | None:
    """The change of a running request's hot rows, as a share of its present rows; negative if
    fewer."""
    gpu, running = snapshot.gpu, snapshot.requests.running
    used = gpu.total_blocks - gpu.free_blocks
    if not running or used <= 0:
        return None
    lease = round(snapshot.hot.multiplier / hot_unit(snapshot.geometry))
    return (to_blocks - lease) * snapshot.geometry.hot_groups * running / used


def _misses_then(snapshot: Snapshot, to_blocks: int, exponent: float) -> float:
    """Misses with other leases / misses now: by the node's curve, else by ``exponent``."""
    now, then = snapshot.hot.multiplier, to_blocks * hot_unit(snapshot.geometry)
    points = snapshot.hot.predicted
    if len(points) > 1 and points[0].multiplier <= then:
        before = _miss_fraction_at(points, now)
        return _miss_fraction_at(points, then) / before if before > 0 else 1.0
    return math.pow(now / then, exponent)


def _miss_fraction_at(points: tuple[MissPoint, ...], multiplier: float) -> float:
    """In proportion between two points, level beyond the ends."""
    before = points[0]
    for point in points:
        if point.multiplier >= multiplier:
            span = point.multiplier - before.multiplier
            part = (multiplier - before.multiplier) / span if span > 0 else 1.0
            return before.miss_fraction + part * (point.miss_fraction - before.miss_fraction)
        before = point
    return before.miss_fraction


PESSIMISM = 1.5
"""Exponent of the miss estimate. Measured misses rise a little less than in proportion when
a buffer shrinks (13 % at 2x, 7 % at 4x top-k); 1.5 overstates that on purpose."""


def propose_multiplier(
    policy: Policy, snapshot: Snapshot, memory: Memory
) -> tuple[Proposal, Mapping[str, int] | None]:
    """The multiplier, or the reason to keep it; and leases to share again while it is kept."""
    bounds = hot_bounds(policy, snapshot.geometry)
    lease = lease_blocks(snapshot.geometry, snapshot.hot.multiplier)
    shrunk = max(bounds.min_blocks, lease - bounds.step_blocks)
    predicted = predicted_bytes_per_s(snapshot, memory, shrunk)
    figures = _figures(policy, snapshot, memory, predicted, lease)
    if bounds.clamp(lease) != lease:
        unit = hot_unit(snapshot.geometry)
        because = f"the range is {bounds.min_blocks * unit:g}x to {bounds.max_blocks * unit:g}x"
        wanted = bounds.clamp(lease)
        return _proposal(snapshot, wanted, Reason.OUTSIDE_BOUNDS, figures, because), None
    no_shortage = wait_is_no_shortage(policy, snapshot, memory)
    grown = min(bounds.max_blocks, lease + bounds.step_blocks)
    less = shrinking(policy, snapshot, memory, shrunk)
    more = growing(policy, snapshot, memory, grown) if grown > lease else None
    if less is not None:
        figures |= {"shrinking_saves_s": less.saved_s, "shrinking_costs_s": less.cost_s}
    if snapshot.requests.waiting and more is not None and more.pays:
        figures |= {"growing_saves_s": more.saved_s, "growing_costs_s": more.cost_s}
        held = _widen_held(policy, snapshot, memory)
        wanted, reason = grown, Reason.FEWER_MISSES_PAY
        because = (
            f"rows not missed save {more.saved_s:.3g}s of every {policy.hot.window_grow:g}s and "
            f"fewer requests at a time cost {more.cost_s:.3g}s"
        )
    elif under_gpu_pressure(policy, snapshot):
        held = no_shortage or _shrink_held(policy, snapshot, memory, lease, bounds, predicted, less)
        wanted, reason = shrunk, Reason.GPU_POOL_PRESSURE
        because = (
            f"requests were short of GPU blocks for {policy.hot.window_shrink:g}s and the misses "
            f"expected then, {format_bytes(round(predicted or 0))}/s, fit the PCIe budget"
        )
    elif free_share(snapshot) >= policy.hot.free_high and not snapshot.requests.waiting:
        held = _grow_held(policy, snapshot, memory, lease, bounds)
        wanted, reason = grown, Reason.ROOM_TO_GROW
        because = (
            f"{free_share(snapshot):.0%} of GPU blocks are free, no request waited in the last "
            f"{policy.hot.window_grow:g}s and rows are still missed"
        )
    else:
        words = f"{free_share(snapshot):.0%} of GPU blocks are free"
        if free_share(snapshot) < policy.hot.free_low:
            words += ", but no request waits for them"
        held = no_shortage or (Reason.IN_DEAD_BAND, words)
        wanted, reason, because = lease, Reason.IN_DEAD_BAND, ""
    if held is None:
        moved = _proposal(snapshot, wanted, reason, figures, because)
        loaded = predicted if wanted == shrunk else _loaded_then(snapshot, memory, wanted)
        expected = expectation.expect_leases(snapshot, wanted, loaded)
        return replace(moved, expected=expected), None
    sharing = propose_sharing(policy, snapshot, memory, lease, bounds)
    if sharing is None:
        return _proposal(snapshot, lease, held[0], figures, held[1]), None
    if sharing.leases is None:
        return _proposal(snapshot, lease, held[0], figures | sharing.figures, held[1]), None
    proposal = Proposal(
        Lever.MULTIPLIER,
        snapshot.hot.multiplier,
        snapshot.hot.multiplier,
        sharing.reason,
        None,
        figures | sharing.figures,
        sharing.action,
        sharing.because,
        expected={} if sharing.kept is None else _shared_expected(memory, sharing.kept),
    )
    return proposal, sharing.leases


def _loaded_then(snapshot: Snapshot, memory: Memory, lease: int) -> float | None:
    """Bytes of rows per second with larger leases; ``None`` where the node has no miss curve."""
    now = memory.signals.shrink_h2d_bytes_total.rate_per_s
    if now is None or not snapshot.hot.predicted:
        return None
    return now * _misses_then(snapshot, lease, 0.0)


def _shared_expected(memory: Memory, kept: float) -> Figures:
    """Bytes of rows per second if ``kept`` of the misses are left."""
    now = memory.signals.shrink_h2d_bytes_total.rate_per_s
    return {Figure.LOADED: now * kept} if now else {}


def predicted_bytes_per_s(snapshot: Snapshot, memory: Memory, lease: int) -> float | None:
    """Host-to-GPU bytes per second if leases were ``lease`` blocks; ``None`` if unknown.

    The node's own miss curve is used where it reaches; else measured loads are scaled by (current /
    new) ** ``PESSIMISM``. Never above the traffic if every host row missed.
    """
    signals, hot = memory.signals, snapshot.hot
    span_s = signals.shrink_loads_total.observed_s
    if span_s <= 0 or not hot.counted:
        return None
    moved, loads = signals.shrink_h2d_bytes_total.rise, signals.shrink_loads_total.rise
    asked = max(loads, signals.shrink_references_total.rise)
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
    predicted: float | None,
    worth: Worth | None,
) -> Held | None:
    span_s = policy.hot.window_shrink
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    if lease == bounds.min_blocks:
        return Reason.LIMITED_BY_FLOOR, "GPU blocks are short but the multiplier is at its minimum"
    waits = _calm(policy, snapshot, memory, Direction.SAFETY, span_s)
    if waits is not None:
        return waits
    pressure = memory.signals.shrink_pressure
    if not pressure.full(span_s) or not pressure.low:
        return Reason.WINDOW_NOT_FULL, f"GPU blocks were not short for all of {span_s:g}s"
    if predicted is None:
        return Reason.MISSING_SIGNAL, "this node does not count missed rows"
    if predicted > policy.hot.pcie_budget:
        because = (
            f"the misses expected with smaller hot buffers, {format_bytes(round(predicted))}/s, "
            f"exceed the PCIe budget of {format_bytes(round(policy.hot.pcie_budget))}/s"
        )
        return Reason.LIMITED_BY_PCIE, because
    if worth is not None and not worth.pays:
        because = (
            f"more misses would cost {worth.cost_s:.3g}s of every {policy.hot.window_grow:g}s and "
            f"more requests at a time save {worth.saved_s:.3g}s"
        )
        return Reason.MISSES_OUTWEIGH, because
    return None


def _widen_held(policy: Policy, snapshot: Snapshot, memory: Memory) -> Held | None:
    """Why larger buffers must wait although they pay."""
    span_s = policy.hot.window_grow
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    waits = _calm(policy, snapshot, memory, Direction.THRIFT, span_s)
    if waits is not None:
        return waits
    if not memory.signals.grow_decode_seconds.full(span_s):
        return Reason.WINDOW_NOT_FULL, f"the cost of steps was not observed for all of {span_s:g}s"
    return None


def _grow_held(
    policy: Policy, snapshot: Snapshot, memory: Memory, lease: int, bounds: HotBounds
) -> Held | None:
    hot, signals = policy.hot, memory.signals
    span_s = hot.window_grow
    if lease == bounds.max_blocks:
        return Reason.LIMITED_BY_CEILING, "there is room but the multiplier is at its maximum"
    if not snapshot.requests.running:
        return Reason.NO_TRAFFIC, "no request runs"
    if not _leasing(snapshot):
        return Reason.NO_BENEFIT, "no running request leases a hot buffer"
    waits = _calm(policy, snapshot, memory, Direction.THRIFT, span_s)
    if waits is not None:
        return waits
    calm_window = signals.grow_free_share.low >= hot.free_high and not signals.grow_waiting.high
    if not signals.grow_free_share.full(span_s) or not calm_window:
        return Reason.WINDOW_NOT_FULL, f"there was not room for all of {span_s:g}s"
    if not snapshot.hot.counted:
        return Reason.MISSING_SIGNAL, "this node does not count missed rows"
    if not signals.grow_loads_total.rise:
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
) -> Held | None:
    back_off = policy.rebalance.back_off
    span_s *= expectation.doubt(policy, memory, Lever.MULTIPLIER)
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
    policy: Policy, snapshot: Snapshot, memory: Memory, predicted: float | None, lease: int
) -> dict[str, float]:
    figures = {
        "gpu_free_ratio": free_share(snapshot),
        "gpu_waiting": float(snapshot.gpu.waiting_for_blocks),
        "waiting_requests": snapshot.requests.waiting,
        "leasing_requests": _leasing(snapshot),
        "lease_blocks": lease,
        "pcie_budget_bytes_per_s": policy.hot.pcie_budget,
    }
    optional = {
        "loads_per_s": memory.signals.shrink_loads_total.rate_per_s,
        "predicted_bytes_per_s": predicted,
        "step_fill_ratio": step_fill(snapshot, memory),
        "core_busy_ratio": core_busy(snapshot),
    }
    known = {name: value for name, value in optional.items() if value is not None}
    return figures | known | expectation.figures(memory, Lever.MULTIPLIER)


def _proposal(
    snapshot: Snapshot, wanted_blocks: int, reason: Reason, figures: dict[str, float], because: str
) -> Proposal:
    current = snapshot.hot.multiplier
    held = wanted_blocks == lease_blocks(snapshot.geometry, current)
    wanted = current if held else wanted_blocks * hot_unit(snapshot.geometry)
    if held:
        action = f"keep the multiplier at {current:g}x"
    else:
        action = f"lease {wanted:g}x instead of {current:g}x from now on"
    limited_by = reason if reason.value.startswith("Limited") else None
    return Proposal(Lever.MULTIPLIER, current, wanted, reason, limited_by, figures, action, because)
