"""Which calls may start: new sessions are refused or held while earlier calls wait.

A call of a known session always passes. Held calls start in order of arrival, as room appears.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from hisparsed.engine.admission import SessionTable

log = logging.getLogger("hisparsed.daemon")

MAX_HELD_CALLS = 1_000
"""More than these are refused whatever the policy says: each keeps a body in memory."""


@dataclass(frozen=True, slots=True)
class SessionLimit:
    """While ``max_waiting`` calls wait, a new session does not start; ``None`` admits all.

    Zero means as soon as any call waits; if none waits, every call starts.
    """

    max_waiting: int | None = None
    retry_after_s: float = 1.0
    when_full: Literal["refuse", "wait"] = "refuse"
    max_wait_s: float = 60.0
    """The longest time that ``wait`` holds a call; then it is refused."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The figures of the engine's last report. ``serial`` differs from report to report."""

    serial: int
    waiting: int
    room: int
    """Calls that could start running at once."""


class Entry(StrEnum):
    ADMITTED = "admitted"
    REFUSED = "refused"
    """At once, or after the longest wait."""
    CLOSED = "closed"
    """No call can start any more: the node stops, or its engine does."""


@dataclass(slots=True)
class _Held:
    marks: Sequence[bytes]
    call_id: str
    until_s: float
    entry: asyncio.Future[Entry]


class SessionLimiter:
    """``clock`` is monotonic seconds; ``queue`` is asked at each decision."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        queue: Callable[[], Queue],
        session_ttl_s: float = 300.0,
        look_every_s: float = 0.1,
    ) -> None:
        self._clock = clock
        self._queue = queue
        self._sessions = SessionTable(session_ttl_s)
        self._look_every_s = look_every_s
        self._held: deque[_Held] = deque()
        self._looking: asyncio.Task[None] | None = None
        self._serial = -1
        self._admitted_since_report = 0
        self._next_id = 0
        self.limit = SessionLimit()
        self.held_total = 0

    @property
    def held(self) -> int:
        """Calls that are held now."""
        return len(self._held)

    def enter(self, marks: Sequence[bytes]) -> tuple[str, asyncio.Future[Entry]]:
        """The call's id, for ``leave``, and the decision about it, now or later."""
        now_s = self._clock()
        self._sessions.expire(now_s)
        self._next_id += 1
        call_id = str(self._next_id)
        entry: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        held = _Held(marks, call_id, now_s + self.limit.max_wait_s, entry)
        if self._sessions.knows(marks):
            self._start(held)
        elif not self._held and self._has_room():
            self._admitted_since_report += 1
            self._start(held)
        elif self.limit.when_full == "refuse" or len(self._held) >= MAX_HELD_CALLS:
            entry.set_result(Entry.REFUSED)
        else:
            self.held_total += 1
            self._held.append(held)
            if self._looking is None or self._looking.done():
                self._looking = asyncio.ensure_future(self._look())
        return call_id, entry

    def leave(self, call_id: str, marks: Sequence[bytes]) -> None:
        """The call ended, was refused, or its client hung up."""
        self._sessions.finish(call_id, marks, 0, self._clock())
        self._held = deque(held for held in self._held if held.call_id != call_id)

    def close(self) -> None:
        """No call can start now: release all held sessions."""
        self._settle_all(Entry.CLOSED)

    def _settle_all(self, entry: Entry) -> None:
        for held in self._held:
            _settle(held, entry)
        self._held.clear()

    def look(self) -> None:
        """Start held calls that there is room for, refuse those that waited too long."""
        now_s = self._clock()
        waiting = deque[_Held]()
        for held in self._held:
            if self.limit.max_waiting is None or self._sessions.knows(held.marks):
                self._start(held)
            elif not waiting and self._has_room():
                self._admitted_since_report += 1
                self._start(held)
            elif now_s >= held.until_s:
                _settle(held, Entry.REFUSED)
            else:
                waiting.append(held)
        self._held = waiting

    async def _look(self) -> None:
        while self._held:
            await asyncio.sleep(self._look_every_s)
            try:
                self.look()
            except Exception:
                log.exception("Held calls cannot be checked; they are refused.")
                self._settle_all(Entry.REFUSED)

    def _start(self, held: _Held) -> None:
        self._sessions.start(held.call_id, held.marks, 0, self._clock())
        _settle(held, Entry.ADMITTED)

    def _has_room(self) -> bool:
        limit = self.limit.max_waiting
        if limit is None:
            return True
        queue = self._queue()
        if queue.serial != self._serial:
            self._serial = queue.serial
            self._admitted_since_report = 0
        waiting = queue.waiting + max(0, self._admitted_since_report - queue.room)
        return waiting == 0 or waiting < limit


def _settle(held: _Held, entry: Entry) -> None:
    if not held.entry.done():
        held.entry.set_result(entry)
