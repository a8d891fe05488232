"""Who gets how much of the hot budget: by marginal gain from each request's own miss curve.

Utility-based partitioning with lookahead (Qureshi and Patt, "Utility-Based Cache
Partitioning", MICRO 2006): blocks go where the next stretch of blocks saves most misses a
block, so a curve that only falls after a plateau is seen across it. Pure arithmetic on hot
blocks of one group; when to share anew is the multiplier's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.policy.signals import LeasePoint, RequestHot


@dataclass(frozen=True, slots=True)
class Sharing:
    """Hot blocks a request, in order of request id, and the misses a step expected."""

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
    """Misses a step with ``blocks``, in proportion between points, level beyond the ends."""
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
    """Give blocks to the best stretch until nothing saves or nothing is left; what is left."""
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
    """The most misses saved a block over any stretch from ``start``, and its length."""
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
