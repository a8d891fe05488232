"""What another size of the hot buffers is worth, in seconds of the node's time. Pure.

Smaller buffers let more requests run, which share the time of steps that only decode; but every
one of them waits longer for rows. Steps with prefill in them share nothing: they last as long as
their prefill. So both sides are weighed over the same window, whatever the traffic is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparsed.policy.bounds import hot_unit
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import MissPoint, Snapshot

MARGIN = 0.25
"""By how much one side must outweigh the other: a dead band against turning back and forth."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds of the window that other leases would save and cost."""

    saved_s: float
    cost_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s > (1 + MARGIN) * self.cost_s


def shrinking(policy: Policy, snapshot: Snapshot, memory: Memory, to_blocks: int) -> Worth | None:
    """Leases of ``to_blocks``, fewer than now; ``None`` where the node does not tell its times.

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

    ``None`` too where the node predicts no misses: what was not measured is not promised.
    """
    times = _times(policy, memory)
    taken = _share_of_blocks(snapshot, to_blocks)
    if times is None or taken is None or not snapshot.hot.predicted:
        return None
    decode_s, rows_s = times
    return Worth(rows_s * (1 - _misses_then(snapshot, to_blocks, 0.0)), decode_s * taken)


def _times(policy: Policy, memory: Memory) -> tuple[float, float] | None:
    """Seconds in steps that only decode, rows left out, and seconds of reading rows."""
    decode = memory.signals.grow_decode_seconds
    if not decode.observed_s:
        return None
    rows_s = memory.signals.grow_h2d_bytes_total.rise / policy.hot.row_rate
    return max(0.0, decode.rise - rows_s), rows_s


def _share_of_blocks(snapshot: Snapshot, to_blocks: int) -> float | None:
    """What a running request would hold more, as a share of what it holds; negative if less."""
    gpu, running = snapshot.gpu, snapshot.requests.running
    used = gpu.total_blocks - gpu.free_blocks
    if not running or used <= 0:
        return None
    lease = round(snapshot.hot.multiplier / hot_unit(snapshot.geometry))
    return (to_blocks - lease) * snapshot.geometry.hot_groups * running / used


def _misses_then(snapshot: Snapshot, to_blocks: int, exponent: float) -> float:
    """Misses with other leases, in those of now: by the node's curve, else by ``exponent``."""
    now, then = snapshot.hot.multiplier, to_blocks * hot_unit(snapshot.geometry)
    points = snapshot.hot.predicted
    if len(points) > 1 and points[0].multiplier <= then:
        before = _at(points, now)
        return _at(points, then) / before if before > 0 else 1.0
    return math.pow(now / then, exponent)


def _at(points: tuple[MissPoint, ...], multiplier: float) -> float:
    """In proportion between two points, level beyond the ends."""
    before = points[0]
    for point in points:
        if point.multiplier >= multiplier:
            span = point.multiplier - before.multiplier
            part = (multiplier - before.multiplier) / span if span > 0 else 1.0
            return before.miss_fraction + part * (point.miss_fraction - before.miss_fraction)
        before = point
    return before.miss_fraction
