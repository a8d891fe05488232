"""How running requests share the hot budget: by marginal gain from each one's own miss curve.

Utility-based partitioning with lookahead (Qureshi and Patt, "Utility-Based Cache Partitioning",
MICRO 2006): blocks go where the next stretch of blocks saves most misses per block, also if a curve
is flat first and falls later. ``share_hot_budget`` is pure arithmetic on hot blocks of one group.
``propose_sharing`` decides when to share again: only if the curves predict a sufficient saving, and
no more often than the multiplier itself may shrink.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hisparsed.policy.bounds import HotBounds, hot_unit
from hisparsed.policy.decisions import Reason
from hisparsed.policy.guards import pace
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import LeasePoint, RequestHot, Snapshot


@dataclass(frozen=True, slots=True)
class Sharing:
    """Hot blocks per request, in order of request id, and the misses per step expected."""

    leases: dict[str, int]
    misses_before: float
    misses_after: float


@dataclass(frozen=True, slots=True)
class _Room:
    low: int
    high: int


def share_hot_budget(
    requests: Sequence[RequestHot],
    budget_blocks: int,
    *,
    floor_blocks: int,
    ceiling_blocks: int,
    max_change_blocks: int,
) -> Sharing:
    """Targets whose sum is at most ``budget_blocks``, each from floor to ceiling.

    Each target is within ``max_change_blocks`` of the one before, except where the budget
    has become too small for that. Same input in any order, same result. Raises ``ValueError``
    when the budget does not cover the floors, or a request has no curve.
    """
    ordered = sorted(requests, key=lambda request: request.request_id)
    _check(ordered, budget_blocks, floor_blocks, ceiling_blocks)
    rooms = _rooms(ordered, budget_blocks, floor_blocks, ceiling_blocks, max_change_blocks)
    blocks = [room.low for room in rooms]
    left = _spend(ordered, rooms, blocks, budget_blocks - sum(blocks))
    for index, request in enumerate(ordered):
        # Blocks that save nothing anywhere stay where they are: moving rows costs as well.
        back = min(left, max(0, min(rooms[index].high, request.target_blocks) - blocks[index]))
        blocks[index] += back
        left -= back
    before = sum(
        request.weight * misses_at(request.curve, request.target_blocks) for request in ordered
    )
    after = sum(
        request.weight * misses_at(request.curve, given)
        for request, given in zip(ordered, blocks, strict=True)
    )
    leases = {request.request_id: given for request, given in zip(ordered, blocks, strict=True)}
    return Sharing(leases, before, after)


def misses_at(curve: Sequence[LeasePoint], blocks: int) -> float:
    """Misses per step with ``blocks``, interpolated between points, constant beyond the ends."""
    before = curve[0]
    if blocks <= before.blocks:
        return before.misses_per_step
    for point in curve:
        if point.blocks >= blocks:
            span = point.blocks - before.blocks
            part = (blocks - before.blocks) / span if span else 1.0
            return before.misses_per_step + part * (point.misses_per_step - before.misses_per_step)
        before = point
    return before.misses_per_step


def _check(requests: Sequence[RequestHot], budget: int, floor: int, ceiling: int) -> None:
    if not 0 < floor <= ceiling:
        raise ValueError(f"floor {floor} and ceiling {ceiling} must be 0 < floor <= ceiling")
    if budget < floor * len(requests):
        raise ValueError(
            f"a budget of {budget} blocks is under the floors of {len(requests)} requests "
            f"({floor} each); it must be at least {floor * len(requests)}"
        )
    for request in requests:
        if not request.curve:
            raise ValueError(f"request {request.request_id} has no miss curve")


def _rooms(
    requests: Sequence[RequestHot], budget: int, floor: int, ceiling: int, max_change: int
) -> list[_Room]:
    lows = [min(ceiling, max(floor, one.target_blocks - max_change)) for one in requests]
    if sum(lows) > budget:
        lows = [floor] * len(requests)
    return [
        _Room(low, max(low, min(ceiling, one.target_blocks + max_change)))
        for low, one in zip(lows, requests, strict=True)
    ]


def _spend(
    requests: Sequence[RequestHot], rooms: Sequence[_Room], blocks: list[int], left: int
) -> int:
    """Give blocks to the best stretch until none saves or none is left; returns the rest."""
    heap: list[tuple[float, int, int]] = []

    def offer(index: int) -> None:
        gain, stretch = _best_stretch(
            requests[index], blocks[index], min(rooms[index].high, blocks[index] + left)
        )
        if gain > 0:
            heapq.heappush(heap, (-gain, index, stretch))

    for index in range(len(requests)):
        offer(index)
    while heap and left:
        _, index, stretch = heapq.heappop(heap)
        if stretch <= left:
            blocks[index] += stretch
            left -= stretch
        # A stretch that no longer fits is looked at again within what is left.
        offer(index)
    return left


def _best_stretch(request: RequestHot, start: int, end: int) -> tuple[float, int]:
    """The most misses saved per block over any stretch from ``start``, and its length."""
    here = misses_at(request.curve, start)
    best, length = 0.0, 0
    ends = [point.blocks for point in request.curve if start < point.blocks < end]
    for stop in (*ends, end):
        if stop <= start:
            continue
        gain = request.weight * (here - misses_at(request.curve, stop)) / (stop - start)
        if gain > best:
            best, length = gain, stop - start
    return best, length


_FEWEST = 2
"""Least requests with a miss curve to share between."""


@dataclass(frozen=True, slots=True)
class Resharing:
    """New leases and why; without leases, the figures of the shares that are kept."""

    reason: Reason
    leases: Mapping[str, int] | None = None
    action: str = ""
    because: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    kept: float | None = None
    """Misses that should be left, as a share of those of before; ``None`` if not predicted."""


def propose_sharing(
    policy: Policy, snapshot: Snapshot, memory: Memory, lease: int, bounds: HotBounds
) -> Resharing | None:
    """``None`` where requests share evenly and should."""
    apart = snapshot.hot.individual_leases
    # A request that has just begun has no curve yet: it keeps the multiplier's lease.
    requests = [request for request in snapshot.requests_hot if request.curve]
    if policy.hot.sharing == "even":
        return _even(snapshot, "the policy shares evenly") if apart else None
    if len(requests) < _FEWEST:
        unknown = f"under {_FEWEST} running requests have a miss curve"
        return _even(snapshot, unknown) if apart else None
    wait_s = policy.hot.window_shrink * pace(memory.sharing, policy.rebalance.back_off)
    if memory.sharing.since_last_s(snapshot.at_s) < wait_s:
        return None
    change = max(1, round(policy.hot.sharing_change * lease))
    shared = share_hot_budget(
        requests,
        lease * len(requests),
        floor_blocks=bounds.min_blocks,
        ceiling_blocks=bounds.max_blocks,
        max_change_blocks=change,
    )
    saved = shared.misses_before - shared.misses_after
    figures = {
        "sharing_requests": float(len(requests)),
        "misses_per_step": shared.misses_before,
        "misses_per_step_shared_anew": shared.misses_after,
    }
    over = sum(request.target_blocks for request in requests) > lease * len(requests)
    if not over and saved <= policy.hot.sharing_gain * shared.misses_before:
        return Resharing(Reason.NO_BENEFIT, figures=figures)
    changed = sum(shared.leases[one.request_id] != one.target_blocks for one in requests)
    unit = hot_unit(snapshot.geometry)
    least, most = min(shared.leases.values()) * unit, max(shared.leases.values()) * unit
    return Resharing(
        Reason.SHARED_BY_GAIN,
        shared.leases,
        f"change the hot buffers of {changed} of {len(requests)} requests, to between {least:g}x "
        f"and {most:g}x",
        f"by the requests' miss curves {shared.misses_before:.0f} misses per step become "
        f"{shared.misses_after:.0f} in the same budget",
        figures,
        shared.misses_after / shared.misses_before if shared.misses_before > 0 else None,
    )


def _even(snapshot: Snapshot, because: str) -> Resharing:
    return Resharing(
        Reason.POLICY_VALUE,
        {},
        f"give all requests {snapshot.hot.multiplier:g}x again",
        because,
        {"individual_leases": float(snapshot.hot.individual_leases)},
    )
