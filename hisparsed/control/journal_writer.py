"""Keeps the journal's file written: opens it, retries with back-off, sets bad files aside.

Synchronous and without a thread of its own; ``Journal`` calls it from one. Trouble with the
disk stops the file and nothing else: records are dropped and counted until a retry works.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hisparsed.control.journal_store import (
    FILE_NAME,
    JournalStore,
    OtherVersionError,
    Retention,
    is_damaged,
    set_aside,
)
from hisparsed.control.records import Record

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class JournalHealth:
    """``error`` says why nothing is written now; ``None`` while the file is written."""

    error: str | None = None
    written: int = 0
    dropped: int = 0
    """Records that are in no file."""
    failures: int = 0
    set_aside: int = 0


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
        self.health = JournalHealth()

    def write(self, records: Sequence[Record]) -> None:
        """Write them, or count them as dropped. Never raises for trouble with the file."""
        if self.health.error is not None and self._clock() < self._retry_at_s:
            self._change(dropped=self.health.dropped + len(records))
            return
        try:
            self._opened().write(records)
        except Exception as error:
            # Whatever it is, it must not end the thread: then nothing would ever be written again.
            self._failed(error, len(records))
            return
        self._change(written=self.health.written + len(records))
        if self.health.error is not None:
            self._log(f"The journal is written again: {self.path}.")
        self._retry_s = FIRST_RETRY_S
        self._change(error=None)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self) -> JournalStore:
        if self._store is not None and self._file_id() != self._opened_file_id:
            # Removed or replaced under us: what is written into the old file nobody would find.
            self.close()
        if self._store is None:
            self._store = self._open()
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
            self._put_aside(error)
            return self._open_once()

    def _open_once(self) -> JournalStore:
        return self._open_store(self.path, run=self._run, retention=self._retention)

    def _put_aside(self, error: Exception) -> None:
        other = isinstance(error, OtherVersionError)
        label = f"schema{error.version}" if isinstance(error, OtherVersionError) else "damaged"
        kept = set_aside(self.path, f"{label}-{self._stamp()}")
        self._change(set_aside=self.health.set_aside + 1)
        why = "has another schema" if other else "is damaged"
        self._log(f"The journal {self.path} {why} ({error}); it is kept as {kept} and begun anew.")

    def _failed(self, error: Exception, lost: int) -> None:
        try:
            self.close()
        except sqlite3.Error:
            self._store = None
        if self.health.error is None:
            self._log(
                f"The journal {self.path} cannot be written ({error}); the node goes on without "
                f"it and tries again, in {self._retry_s:g}s first."
            )
        if is_damaged(error):
            # Put aside here, since the next opening may look at other pages and find nothing.
            try:
                self._put_aside(error)
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
