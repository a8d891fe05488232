"""The API side of admission in virtual time: new sessions and long calls that wait or are refused.

As the daemon's gate enforces it: sessions under way are never held, calls beyond the context
limit take turns. What a client does with a refusal is the driver's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from hisparsed.policy.signals import Admission

Item = TypeVar("Item")


class Verdict(Enum):
    """What becomes of a call that arrives."""

    SEND = auto()
    HELD = auto()
    """Later, by ``due``."""
    REFUSED = auto()
    """429: it may come again after ``retry_after_s``."""
    TOO_LONG = auto()
    """400 for its length: coming again would not help."""


@dataclass(frozen=True, slots=True)
class Due(Generic[Item]):
    """Calls that are no longer held."""

    send: list[Item]
    refused: list[Item]


class Gate(Generic[Item]):
    """``admission`` of ``None`` lets all pass."""

    def __init__(self) -> None:
        self._new: deque[tuple[float, Item]] = deque()
        self._long: deque[Item] = deque()
        self._long_running: Item | None = None

    def arrive(
        self,
        item: Item,
        *,
        tokens: int,
        new_session: bool,
        admission: Admission | None,
        waiting: int,
        now_s: float,
    ) -> Verdict:
        """``tokens``: prompt and asked answer. ``waiting``: calls that wait in the engine."""
        if admission is None:
            return Verdict.SEND
        longest = admission.max_context_tokens
        if longest is not None and tokens > longest:
            return self._arrive_long(item, admission)
        limit = admission.max_waiting_sessions
        if limit is None or not new_session or (_has_room(waiting, limit) and not self._new):
            return Verdict.SEND
        if admission.when_full == "refuse":
            return Verdict.REFUSED
        self._new.append((now_s, item))
        return Verdict.HELD

    def _arrive_long(self, item: Item, admission: Admission) -> Verdict:
        if admission.over_max_context == "refuse":
            return Verdict.TOO_LONG
        if self._long_running is None:
            self._long_running = item
            return Verdict.SEND
        self._long.append(item)
        return Verdict.HELD

    def due(self, admission: Admission | None, waiting: int, now_s: float) -> Due[Item]:
        """Held calls whose turn has come, and those that were held for ``max_wait_s``."""
        found: Due[Item] = Due([], [])
        limit = None if admission is None else admission.max_waiting_sessions
        while self._new:
            since_s, item = self._new[0]
            if limit is None or _has_room(waiting + len(found.send), limit):
                found.send.append(item)
            elif admission is not None and now_s - since_s >= admission.max_wait_s:
                found.refused.append(item)
            else:
                break
            self._new.popleft()
        if self._long and self._long_running is None:
            self._long_running = self._long.popleft()
            found.send.append(self._long_running)
        return found

    def finished(self, item: Item) -> None:
        """A call has ended; the next long one may begin."""
        if item is self._long_running:
            self._long_running = None


def _has_room(waiting: int, limit: int) -> bool:
    """Where nothing waits, everybody starts."""
    return waiting == 0 or waiting < limit
