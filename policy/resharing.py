"""When running requests share the hot budget anew, and back to even shares.

The budget is what the multiplier gives them all; ``sharing`` divides it. Moves only when
the curves promise enough, and no more often than the multiplier itself may shrink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hisparsed.policy.bounds import HotBounds, hot_unit
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.sharing import share_hot_budget
from hisparsed.policy.signals import Snapshot

_FEWEST = 2
"""Requests with a miss curve, below which there is nothing to share out."""


@dataclass(frozen=True, slots=True)
class Resharing:
    """New leases and why; without leases, the figures of the shares that are kept."""

    reason: Reason
    leases: Mapping[str, int] | None = None
    action: str = ""
    because: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def propose_sharing(
    policy: Policy, snapshot: Snapshot, memory: Memory, lease: int, bounds: HotBounds
) -> Resharing | None:
    """``None`` where requests share evenly and are to."""
    apart = snapshot.hot.individual_leases
    # A request that has just begun has no curve yet: it keeps the multiplier's lease.
    requests = [request for request in snapshot.requests_hot if request.curve]
    if policy.hot.sharing == "even":
        return _even(snapshot, "the policy shares evenly") if apart else None
    if len(requests) < _FEWEST:
        unknown = f"under {_FEWEST} running requests have a miss curve"
        return _even(snapshot, unknown) if apart else None
    if memory.sharing.since_last_s(snapshot.at_s) < policy.hot.window_shrink:
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
        f"by their own miss curves {shared.misses_before:.0f} misses a step become "
        f"{shared.misses_after:.0f} in the same budget",
        figures,
    )


def _even(snapshot: Snapshot, because: str) -> Resharing:
    return Resharing(
        Reason.POLICY_VALUE,
        {},
        f"give all requests {snapshot.hot.multiplier:g}x again",
        because,
        {"individual_leases": float(snapshot.hot.individual_leases)},
    )
