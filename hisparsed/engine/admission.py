"""The order in which waiting calls start, under over-subscription: pure data in, order out.

First-come order plus LRU collapses when the live set outgrows the pools: calls lose their
prefix while they queue. Starting the call that is cheapest to recompute keeps what is held
useful; ageing bounds how long any call can be passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True)
class WaitingCall:
    """A waiting call: ``recompute_tokens`` are those that no pool holds any more."""

    index: int
    recompute_tokens: int
    waited_s: float


class OldestTurn:
    """When the call that has waited longest is due, however dear: once in so many starts.

    Ageing alone lets calls through in bursts, and above what the node can recompute it becomes
    the order of arrival again. A share of the starts never does.
    """

    def __init__(self) -> None:
        self._waited: frozenset[str] = frozenset()
        self._oldest = ""
        self._credit = 0.0

    def due(self, waiting: Iterable[str], oldest: str, share: float) -> bool:
        """``waiting`` calls before a pass, the ``oldest`` of them among them. What no longer
        waits has started; a turn stands until it is taken, and never more than one."""
        now = frozenset(waiting)
        started = self._waited - now
        if self._oldest in started:
            self._credit = 0.0
        self._credit += share * len(started - {self._oldest})
        self._waited, self._oldest = now, oldest
        return self._credit >= 1.0 - _ROUNDING


def held_prefix_first(
    calls: Sequence[WaitingCall], ageing_s: float, *, oldest_first: bool = False
) -> list[int]:
    """Indices in starting order: aged calls by waiting time, then cheapest to recompute.

    ``oldest_first`` puts the call that has waited longest before all. Ties keep the order of
    arrival, so the result is stable and deterministic.
    """
    if oldest_first and calls:
        ageing_s = min(ageing_s, max(call.waited_s for call in calls))
    aged = [call for call in calls if call.waited_s >= ageing_s]
    fresh = [call for call in calls if call.waited_s < ageing_s]
    aged.sort(key=lambda call: (-call.waited_s, call.index))
    fresh.sort(key=lambda call: (call.recompute_tokens, call.index))
    return [call.index for call in (*aged, *fresh)]
