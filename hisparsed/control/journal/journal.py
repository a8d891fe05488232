"""The journal of a running daemon: the latest records in memory, all of them in a file.

The control loop only appends and never waits for a disk. A thread writes; ``JournalWriter`` retries
with back-off, and drops and counts records while the disk fails. Reading joins memory and file.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hisparsed.control.journal.records import (
    DecisionView,
    EventRecord,
    EventView,
    PolicyRecord,
    Record,
    TickRecord,
    view_event,
    view_tick,
)
from hisparsed.control.journal.store import (
    FILE_NAME,
    JournalStore,
    OtherVersionError,
    Query,
    Retention,
    is_damaged,
    read_decisions,
    read_events,
    set_aside,
)

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class JournalHealth:
    """``error``: why nothing is written now; ``None`` while the file is written."""

    error: str | None = None
    written: int = 0
    dropped: int = 0
    """Records that were not written to a file."""
    failures: int = 0
    set_aside: int = 0
    lost: int = 0
    """Times that the file was removed or replaced while it was written."""


class JournalWriter:
    """``clock`` is monotonic seconds, ``stamp`` names files that are set aside.

    ``log`` gets one sentence when writing stops and one when it works again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        clock: Callable[[], float],
        stamp: Callable[[], str],
        log: Callable[[str], None],
        retention: Retention | None = None,
        open_store: Callable[..., JournalStore] = JournalStore,
    ) -> None:
        self.path = folder / FILE_NAME
        self._run = run
        self._clock = clock
        self._stamp = stamp
        self._log = log
        self._retention = retention or Retention()
        self._open_store = open_store
        self._store: JournalStore | None = None
        self._opened_file_id: tuple[int, int] | None = None
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self._policy: Sequence[PolicyRecord] = ()
        """The policy in force, if it was written before."""
        self.health = JournalHealth()

    def write(self, records: Sequence[Record]) -> None:
        """Write them, or count them as dropped. Never raises for errors of the file."""
        if self.health.error is not None and self._clock() < self._retry_at_s:
            self._change(dropped=self.health.dropped + len(records))
            return
        try:
            self._opened().write(records)
            self._keep_policy(records)
        except Exception as error:
            # No error may end the thread: nothing would be written after it.
            self._failed(error, len(records))
            return
        self._change(written=self.health.written + len(records))
        if self.health.error is not None:
            self._log(f"The journal is written again: {self.path}.")
        self._retry_s = FIRST_RETRY_S
        self._change(error=None)

    def _keep_policy(self, records: Sequence[Record]) -> None:
        found = [record for record in records if isinstance(record, PolicyRecord)]
        self._policy = found[-1:] or self._policy

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self) -> JournalStore:
        if self._store is not None and self._file_id() != self._opened_file_id:
            # The file was removed or replaced: records in the old file would be lost.
            self.close()
            self._change(lost=self.health.lost + 1)
            self._log(f"The journal {self.path} was removed or replaced; a new one was created.")
        if self._store is None:
            self._store = self._open()
            if self._policy:
                # A new file needs a record of the policy too.
                self._store.write(self._policy)
            self._opened_file_id = self._file_id()
        return self._store

    def _file_id(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _open(self) -> JournalStore:
        try:
            return self._open_once()
        except (sqlite3.Error, OtherVersionError) as error:
            if isinstance(error, sqlite3.Error) and not is_damaged(error):
                raise
            self._set_file_aside(error)
            return self._open_once()

    def _open_once(self) -> JournalStore:
        return self._open_store(self.path, run=self._run, retention=self._retention)

    def _set_file_aside(self, error: Exception) -> None:
        other = isinstance(error, OtherVersionError)
        label = f"schema{error.version}" if isinstance(error, OtherVersionError) else "damaged"
        kept = set_aside(self.path, f"{label}-{self._stamp()}")
        self._change(set_aside=self.health.set_aside + 1)
        why = "has another schema" if other else "is damaged"
        self._log(
            f"The journal {self.path} {why} ({error}); it is kept as {kept} and a new one "
            f"was created."
        )

    def _failed(self, error: Exception, lost: int) -> None:
        try:
            self.close()
        except sqlite3.Error:
            self._store = None
        if self.health.error is None:
            self._log(
                f"The journal {self.path} cannot be written ({error}); the node continues without "
                f"it and tries again, in {self._retry_s:g}s first."
            )
        if is_damaged(error):
            # Set aside here, since the next open may read other pages and find no damage.
            try:
                self._set_file_aside(error)
            except OSError as trouble:
                error = trouble
        self._retry_at_s = self._clock() + self._retry_s
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        self._change(
            error=str(error) or type(error).__name__,
            dropped=self.health.dropped + lost,
            failures=self.health.failures + 1,
        )

    def _change(self, **changes: object) -> None:
        # One assignment, because the event loop reads it from another thread.
        self.health = replace(self.health, **changes)  # type: ignore[arg-type]


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
        elif isinstance(record, EventRecord):
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
        """The id that distinguishes this run's records from earlier ones."""
        return self._run

    @property
    def ticks(self) -> tuple[TickRecord, ...]:
        """Those still in memory, oldest first."""
        return tuple(self._ticks)

    async def decisions(self, query: Query) -> list[DecisionView]:
        """Matching decisions, newest first; the file's part is omitted if it cannot be read."""
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
        """Events, newest first; the file's part is omitted if it cannot be read."""
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
