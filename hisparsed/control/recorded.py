"""A journal file asked the questions that a running node answers, for `explain --journal`.

Any node's recording will do, a simulated one's as well. Reads only.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from hisparsed.control.journal_store import FILE_NAME, Query, read_decisions, read_events
from hisparsed.control.records import DecisionView, EventView
from hisparsed.errors import UserError
from hisparsed.policy.reasons import Lever

_OTHER_RUN = ""
"""A run that no record has: nothing of the file is left out."""


class RecordedJournal:
    """``path`` is a journal or its folder. Raises ``UserError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = path / FILE_NAME if path.is_dir() else path
        if not self._file.is_file():
            raise UserError(
                f"--journal: there is no file {self._file}; name a journal.sqlite or its folder"
            )
        newest = self.decisions(limit=1)
        self.end_unix_s = newest[0].at_unix_s if newest else 0.0
        """When the recording ends; 0 for an empty one."""

    def decisions(
        self,
        *,
        limit: int,
        lever: str | None = None,
        code: str | None = None,
        since: float | None = None,
        notable: bool = False,
    ) -> list[DecisionView]:
        """Newest first."""
        query = Query(limit, since, None if lever is None else Lever(lever), code, notable)
        try:
            return list(read_decisions(self._file, query, run=_OTHER_RUN, before=0))
        except sqlite3.Error as error:
            raise UserError(f"{self._file} cannot be read as a journal: {error}") from None

    def journal_events(self, limit: int) -> list[EventView]:
        """Newest first."""
        try:
            return read_events(self._file, limit, run=_OTHER_RUN, before=0)
        except sqlite3.Error as error:
            raise UserError(f"{self._file} cannot be read as a journal: {error}") from None
