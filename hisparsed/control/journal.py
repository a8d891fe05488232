"""The journal: the latest records in memory, all of them in a file written by a thread.

The control loop only ever appends; it never waits for a disk. Reading joins both: the ring
first, then what the file holds beyond it.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hisparsed.control.journal_store import Query, read_decisions, read_events
from hisparsed.control.journal_writer import JournalHealth, JournalWriter
from hisparsed.control.records import (
    DecisionView,
    EventRecord,
    EventView,
    Record,
    TickRecord,
    view_event,
    view_tick,
)

RING_TICKS = 900
RING_EVENTS = 200
QUEUE_RECORDS = 2_000
_BATCH = 200


class Journal:
    """``start`` begins the thread, ``close`` writes what is queued and ends it."""

    def __init__(self, writer: JournalWriter, *, run: str, ring_ticks: int = RING_TICKS) -> None:
        self._writer = writer
        self._run = run
        self._ticks: deque[TickRecord] = deque(maxlen=ring_ticks)
        self._events: deque[EventRecord] = deque(maxlen=RING_EVENTS)
        self._queue: queue.Queue[Record | None] = queue.Queue(maxsize=QUEUE_RECORDS)
        self._overflow = 0
        self._sequence = 0
        self._thread = threading.Thread(target=self._write_queued, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Blocks until the file is written and closed, at most ``timeout_s``."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    @property
    def health(self) -> JournalHealth:
        health = self._writer.health
        return replace(health, dropped=health.dropped + self._overflow)

    def next_sequence(self) -> int:
        """The number for the next record of this run."""
        self._sequence += 1
        return self._sequence

    def record(self, record: Record) -> None:
        """Keep it in memory and queue it for the file; never blocks, never raises."""
        if isinstance(record, TickRecord):
            self._ticks.append(record)
        else:
            self._events.append(record)
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._overflow += 1

    @property
    def path(self) -> Path:
        """The file; it may not exist yet."""
        return self._writer.path

    @property
    def run(self) -> str:
        """What tells this run's records from those of earlier ones."""
        return self._run

    @property
    def ticks(self) -> tuple[TickRecord, ...]:
        """Those still in memory, oldest first."""
        return tuple(self._ticks)

    async def decisions(self, query: Query) -> list[DecisionView]:
        """Decisions that fit, newest first; the file's part is left out if it cannot be read."""
        found = list(islice(self._in_memory(query), query.limit))
        oldest = self._ticks[0] if self._ticks else None
        missing = query.limit - len(found)
        reached = (
            oldest is not None
            and query.since_unix_s is not None
            and oldest.at_unix_s < query.since_unix_s
        )
        if missing == 0 or reached:
            return found
        before = oldest.sequence if oldest is not None else self._sequence + 1
        rest = replace(query, limit=missing)
        try:
            found += await asyncio.to_thread(
                lambda: list(read_decisions(self._writer.path, rest, run=self._run, before=before))
            )
        except sqlite3.Error:
            return found
        return found

    async def events(self, limit: int) -> list[EventView]:
        """Events, newest first; the file's part is left out if it cannot be read."""
        found = [view_event(event) for event in islice(reversed(self._events), limit)]
        if len(found) == limit:
            return found
        before = self._events[0].sequence if self._events else self._sequence + 1
        try:
            found += await asyncio.to_thread(
                read_events, self._writer.path, limit - len(found), run=self._run, before=before
            )
        except sqlite3.Error:
            return found
        return found

    def recent_events(self, limit: int) -> list[EventView]:
        """Events of this run still in memory, newest first."""
        return [view_event(event) for event in islice(reversed(self._events), limit)]

    def _in_memory(self, query: Query) -> Iterator[DecisionView]:
        for tick in reversed(self._ticks):
            for view in view_tick(tick):
                if query.wants(view):
                    yield view

    def _write_queued(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            ended = None in batch
            records = [record for record in batch if record is not None]
            if records:
                self._writer.write(records)
        self._writer.close()
