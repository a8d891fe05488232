"""The order in which waiting calls start, under over-subscription: pure data in, order out.

First-come order plus LRU collapses when the live set outgrows the pools: calls lose their
prefix while they queue. Starting the call that is cheapest to recompute keeps what is held
useful; ageing bounds how long any call can be passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitingCall:
    """A waiting call: ``recompute_tokens`` are those that no pool holds any more."""

    index: int
    recompute_tokens: int
    waited_s: float


def held_prefix_first(calls: Sequence[WaitingCall], ageing_s: float) -> list[int]:
    """Indices in starting order: aged calls by waiting time, then cheapest to recompute.

    Ties keep the order of arrival, so the result is stable and deterministic.
    """
    aged = [call for call in calls if call.waited_s >= ageing_s]
    fresh = [call for call in calls if call.waited_s < ageing_s]
    aged.sort(key=lambda call: (-call.waited_s, call.index))
    fresh.sort(key=lambda call: (call.recompute_tokens, call.index))
    return [call.index for call in (*aged, *fresh)]
