"""Reach and the equal-reach split: integer arithmetic on real bytes, no judgement.

Everything is counted in whole host blocks and whole chunks, with padding and copies. A running
request's tokens take room in **both** pools: its pages are in use in the HiSparse pool, and its
chunks are the newest in the offload pool, which evicts them last. Without the second part the
offload pool would shrink while requests run, and their prefixes would be lost when they finish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparsed.policy.signals import EngineReport, GhostPoint, PoolGeometry

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Reach:
    """Tokens of idle prefix that each pool can hold with its present blocks."""

    hisparse_tokens: int
    offload_tokens: int

    @property
    def min_tokens(self) -> int:
        """A prefix hit is the minimum of both pools."""
        return min(self.hisparse_tokens, self.offload_tokens)


def hisparse_reach_tokens(geometry: PoolGeometry, capacity_blocks: int, in_use_blocks: int) -> int:
    """Tokens of idle prefix in ``capacity_blocks`` host blocks."""
    return max(0, capacity_blocks - in_use_blocks) * geometry.block_tokens


def occupied_tokens(
    geometry: PoolGeometry, hisparse_in_use_blocks: int, in_flight_chunks: int
) -> int:
    """Tokens of the offload pool that are not idle: of running requests, or in flight."""
    running_tokens = hisparse_in_use_blocks * geometry.block_tokens
    return max(in_flight_chunks * geometry.offload_chunk_tokens, running_tokens)


def offload_reach_tokens(geometry: PoolGeometry, capacity_chunks: int, occupied: int) -> int:
    """Tokens of idle prefix in ``capacity_chunks``, where ``occupied`` tokens are not idle."""
    return max(0, capacity_chunks * geometry.offload_chunk_tokens - occupied)


def reach_now(snapshot: EngineReport) -> Reach:
    """Reach of both pools with the capacity they physically own."""
    geometry, in_use = snapshot.geometry, snapshot.hisparse.in_use_blocks
    occupied = occupied_tokens(geometry, in_use, snapshot.offload.in_use_chunks)
    return Reach(
        hisparse_reach_tokens(geometry, snapshot.hisparse.capacity_blocks, in_use),
        offload_reach_tokens(geometry, snapshot.offload.capacity_chunks, occupied),
    )


def reach_at(
    geometry: PoolGeometry,
    offload_blocks: int,
    in_use_blocks: int,
    in_flight: int,
    shared_blocks: int | None = None,
) -> Reach:
    """Reach of both pools if ``offload_blocks`` were lent of the ``shared_blocks`` of both.

    ``None`` shares the whole budget.
    """
    occupied = occupied_tokens(geometry, in_use_blocks, in_flight)
    shared = geometry.budget_blocks if shared_blocks is None else shared_blocks
    return Reach(
        hisparse_reach_tokens(geometry, shared - offload_blocks, in_use_blocks),
        offload_reach_tokens(geometry, offload_blocks * geometry.chunks_per_host_block, occupied),
    )


def equal_reach_blocks(
    geometry: PoolGeometry,
    margin: float,
    in_use_blocks: int,
    in_flight_chunks: int,
    shared_blocks: int | None = None,
) -> int:
    """Fewest lent blocks with offload reach >= HiSparse reach x (1 + ``margin``).

    The blocks of running requests must fit as well. While they do, the answer falls with
    ``in_use_blocks`` and rises with ``in_flight_chunks``, so the lowest of the first and the
    highest of the second in a window are safe for all of it. ``shared_blocks`` are those of both
    pools; ``None`` is the whole budget.
    """
    shared = geometry.budget_blocks if shared_blocks is None else shared_blocks
    wide = (1 + margin) * geometry.block_tokens
    idle_blocks = max(0, shared - in_use_blocks)
    occupied = occupied_tokens(geometry, in_use_blocks, in_flight_chunks)
    lent_tokens = geometry.chunks_per_host_block * geometry.offload_chunk_tokens
    blocks = math.ceil((wide * idle_blocks + occupied) / (wide + lent_tokens) - _ROUNDING)
    if blocks > idle_blocks:
        blocks = max(idle_blocks, -(-occupied // lent_tokens))
    return min(blocks, shared)


def live_load(snapshot: EngineReport, reach: Reach) -> float:
    """The idle live set as a share of the smaller reach: the inverse of coverage.

    Running sessions are in use, which reach excludes, so they are not in this live set either.
    """
    running_tokens = snapshot.hisparse.in_use_blocks * snapshot.geometry.block_tokens
    idle_tokens = max(0, snapshot.sessions.live_set_tokens - running_tokens)
    return idle_tokens / max(1, reach.min_tokens)


def served_with(points: tuple[GhostPoint, ...], extra_blocks: int) -> float | None:
    """Tokens that ``extra_blocks`` more would have served; ``None`` without a ghost list.

    Interpolated between two points; beyond the last point, its value.
    """
    if not points:
        return None
    before = GhostPoint(0, 0)
    for point in points:
        if point.extra_blocks >= extra_blocks:
            part = (extra_blocks - before.extra_blocks) / (point.extra_blocks - before.extra_blocks)
            return before.tokens_total + part * (point.tokens_total - before.tokens_total)
        before = point
    return float(before.tokens_total)
