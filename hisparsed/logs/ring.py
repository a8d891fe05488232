"""The latest log lines of daemon and engine, in memory, for the control API.

A bounded window; standard error has the full log. Any thread may add lines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from itertools import count, islice
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hisparsed.policy.problems import printable

Source = Literal["daemon", "engine"]

RING_LINES = 2_000
LONGEST_TEXT = 4_000
_NEW_LINES = 200


class LogLine(BaseModel):
    """One record; ``text`` may have line breaks (a traceback)."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    """Counts the lines of this run of the daemon, from 1."""
    at_unix_s: float
    source: Source
    level: int
    """As in ``logging``: 20 info, 30 warning, 40 error."""
    logger: str
    text: str


class LogRing:
    """Keeps the last ``size`` lines; the oldest are dropped first."""

    def __init__(self, size: int = RING_LINES) -> None:
        self._lines: deque[LogLine] = deque(maxlen=size)
        self._new: deque[LogLine] = deque(maxlen=_NEW_LINES)
        self._numbers = count(1)

    def add(self, source: Source, at_unix_s: float, level: int, logger: str, text: str) -> None:
        line = LogLine(
            sequence=next(self._numbers),
            at_unix_s=at_unix_s,
            source=source,
            level=level,
            logger=logger,
            text=printable(text[:LONGEST_TEXT]),
        )
        self._lines.append(line)
        self._new.append(line)

    def lines(self, *, limit: int, level: int = 0, source: Source | None = None) -> list[LogLine]:
        """The newest that fit, oldest first."""
        fitting: Iterable[LogLine] = (
            line
            for line in reversed(tuple(self._lines))
            if line.level >= level and source in (None, line.source)
        )
        return list(islice(fitting, limit))[::-1]

    def take_new(self) -> list[LogLine]:
        """Lines since the last call, oldest first; of a burst only the last lines."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return taken


class RingHandler(logging.Handler):
    """Puts this process's records into the ring, as the daemon's."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._ring.add("daemon", record.created, record.levelno, record.name, text)
