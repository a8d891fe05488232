"""Figures computed from a snapshot alone: bytes of the pools, reach, coverage, means.

One function for the status, the metrics and the journal that the TUI plays. Imports the standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.policy.reach import live_load, reach_now, served_with
from hisparsed.policy.signals import Snapshot

GHOST_STEP = 0.01
"""Share of the budget for which status and metrics show the predictions of the ghost lists."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One host pool. ``target`` is what the policy set, ``capacity`` what it owns now."""

    target_bytes: int
    capacity_bytes: int
    in_use_bytes: int
    cached_bytes: int
    """Idle, but a reusable prefix."""
    reach_tokens: int
    ghost_tokens_total: int | None
    """Tokens that 1 % of the budget more would have served; ``None`` without a ghost list."""


@dataclass(frozen=True, slots=True)
class PoolsMemory:
    """Both pools in bytes. A stored chunk counts with all its copies and padding."""

    budget_bytes: int
    hisparse: PoolFigures
    offload: PoolFigures
    pending_bytes: int
    """Assigned to the offload pool, not yet moved."""
    draining_bytes: int
    """Recalled from the offload pool, still in use."""
    reserve_bytes: int
    """In reserve, lent to no pool."""
    reserve_target_bytes: int


@dataclass(frozen=True, slots=True)
class Derived:
    """Everything that is computed from a snapshot to be shown."""

    pools: PoolsMemory
    min_reach_tokens: int
    coverage: float | None
    """Smaller reach / idle live set; ``None`` when nothing idle is live."""
    mean_ttft_s: float | None
    mean_itl_s: float | None


def derive(snapshot: Snapshot) -> Derived:
    """The figures of ``snapshot``; takes well under a millisecond."""
    geometry, hisparse, offload = snapshot.geometry, snapshot.hisparse, snapshot.offload
    block, reach, latencies = geometry.host_block_bytes, reach_now(snapshot), snapshot.latencies
    chunk = geometry.offload_chunk_bytes * geometry.offload_copies
    step = max(1, int(GHOST_STEP * geometry.budget_blocks + 1e-9))
    load = live_load(snapshot, reach)
    return Derived(
        pools=PoolsMemory(
            budget_bytes=geometry.budget_blocks * block,
            hisparse=PoolFigures(
                target_bytes=hisparse.target_blocks * block,
                capacity_bytes=hisparse.capacity_blocks * block,
                in_use_bytes=hisparse.in_use_blocks * block,
                cached_bytes=hisparse.cached_blocks * block,
                reach_tokens=reach.hisparse_tokens,
                ghost_tokens_total=_whole(served_with(hisparse.ghost, step)),
            ),
            offload=PoolFigures(
                target_bytes=offload.target_blocks * block,
                capacity_bytes=offload.lent_blocks * block,
                in_use_bytes=offload.in_use_chunks * chunk,
                cached_bytes=max(0, offload.stored_chunks - offload.in_use_chunks) * chunk,
                reach_tokens=reach.offload_tokens,
                ghost_tokens_total=_whole(served_with(offload.ghost, step)),
            ),
            pending_bytes=snapshot.pending_blocks * block,
            draining_bytes=snapshot.draining_blocks * block,
            reserve_bytes=snapshot.reserve.blocks * block,
            reserve_target_bytes=snapshot.reserve.target_blocks * block,
        ),
        min_reach_tokens=reach.min_tokens,
        coverage=1 / load if load > 0 else None,
        mean_ttft_s=_mean(latencies.ttft_sum_s, latencies.ttft_count),
        mean_itl_s=_mean(latencies.itl_sum_s, latencies.itl_count),
    )


def _whole(tokens: float | None) -> int | None:
    return None if tokens is None else int(tokens)


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


HISTORY = (
    "derived.pools.hisparse.in_use_bytes",
    "derived.pools.hisparse.cached_bytes",
    "derived.pools.hisparse.capacity_bytes",
    "derived.pools.hisparse.reach_tokens",
    "derived.pools.offload.in_use_bytes",
    "derived.pools.offload.cached_bytes",
    "derived.pools.offload.capacity_bytes",
    "derived.pools.offload.reach_tokens",
    "observed.sessions.live_set_tokens",
    "derived.coverage",
    "observed.requests.running",
    "observed.requests.waiting",
    "observed.requests.preemptions_total",
    "observed.requests.finished_total",
    "observed.gpu.free_blocks",
    "observed.gpu.total_blocks",
    "observed.hot.multiplier",
    "observed.hot.references_total",
    "observed.hot.resident_total",
    "observed.hot.hits_total",
    "observed.hot.loads_total",
    "observed.hot.h2d_bytes_total",
    "observed.tokens.prompt_total",
    "observed.tokens.generated_total",
    "observed.prefix.query_tokens_total",
    "observed.prefix.hit_tokens_total",
    "observed.latencies.ttft_sum_s",
    "observed.latencies.ttft_count",
    "observed.latencies.itl_sum_s",
    "observed.latencies.itl_count",
)
"""The figures of the last two hours, as paths into the status document: columns of
``/v1/history``, and what the TUI draws series from."""
HOT_ROWS = frozenset(one for one in HISTORY if one.startswith("observed.hot.") and "_total" in one)
"""Those of them that mean nothing where ``observed.hot.counted`` is false."""
