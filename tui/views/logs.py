"""Log lines of daemon and engine, filtered; repeated lines are shown once.

Lines are the same when they differ in numbers only. vLLM writes statistics every ten seconds, over
its own windows; folded they are one line with a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, line, wrap
from hisparsed.tui.wire import Document, number, text

_LEVELS = ((40, "ERROR", "bad"), (30, "WARN", "warn"), (20, "info", ""), (0, "debug", "dim"))
_STEPS = (0, 20, 30, 40)
_WARNING = 30
_SOURCES = (None, "daemon", "engine")
_LOGGERS_WIDTH = 110
_MOST_LINES = 30
_MOST_LINES_OF_INFO = 6
_MOST_LINES_FOLDED = 2
"""For informational lines that repeat."""
_NUMBERS = re.compile(r"[0-9][0-9.,:eE+%-]*")
_SHAPE = 200
"""Characters by which lines are distinguished."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    level: int = 20
    source: str | None = None
    search: str = ""
    fold: bool = True
    """Whether lines that repeat with other numbers are shown once."""

    def passes(self, entry: Document) -> bool:
        return (
            (number(entry, "level") or 0) >= self.level
            and self.source in (None, entry.get("source"))
            and (not self.search or self.search.lower() in _words(entry))
        )

    def next_level(self) -> LogFilter:
        return replace(self, level=_STEPS[(_STEPS.index(self.level) + 1) % len(_STEPS)])

    def next_source(self) -> LogFilter:
        return replace(self, source=_SOURCES[(_SOURCES.index(self.source) + 1) % len(_SOURCES)])

    @property
    def words(self) -> str:
        level = _level(self.level)[0].lower()
        parts = [self.source or "daemon and engine", f"{level} and worse" if level else ""]
        if self.search:
            parts.append(f'"{self.search}"')
        if self.fold:
            parts.append("repeats folded")
        return ", ".join(part for part in parts if part)


def log_entries(model: NodeModel, wanted: LogFilter) -> int:
    """How many entries pass."""
    return sum(wanted.passes(entry) for entry in model.logs)


@dataclass(slots=True)
class _Shown:
    """An entry, its count and its first time."""

    entry: Document
    count: int
    first_s: float | None


def _folded(entries: Iterable[Document]) -> list[_Shown]:
    """Repeated entries are at the place of the latest."""
    found: dict[tuple[str, ...], _Shown] = {}
    for entry in entries:
        shape = _NUMBERS.sub("#", text(entry, "text") or "")[:_SHAPE]
        # Text, since a node of another version may send any value, and lists cannot be keys.
        key = (*(str(entry.get(name)) for name in ("source", "logger", "level")), shape)
        before = found.pop(key, None)
        count = 1 if before is None else before.count + 1
        first_s = number(entry, "at_unix_s") if before is None else before.first_s
        found[key] = _Shown(entry, count, first_s)
    return list(found.values())


def log_lines(model: NodeModel, wanted: LogFilter, width: int) -> list[Line]:
    """Oldest first; long entries take several lines, very long ones are cut."""
    loggers = width >= _LOGGERS_WIDTH
    passing = [entry for entry in model.logs if wanted.passes(entry)]
    shown = _folded(passing) if wanted.fold else [_Shown(one, 1, None) for one in passing]
    return [one for entry in shown for one in _entry_lines(entry, width, loggers=loggers)]


def _entry_lines(shown: _Shown, width: int, *, loggers: bool) -> list[Line]:
    entry, indent = shown.entry, 22 + (23 if loggers else 0)
    level = number(entry, "level") or 0
    repeated = ""
    most = _MOST_LINES if level >= _WARNING else _MOST_LINES_OF_INFO
    if shown.count > 1:
        repeated = f"{shown.count}x since {fmt.clock(shown.first_s)}: "
        most = _MOST_LINES if level >= _WARNING else _MOST_LINES_FOLDED
    word, role = _level(level)
    words = f"{repeated}{text(entry, 'text') or ''}"
    first, *more = wrap(words, max(20, width - indent - 1), role)
    head = line(
        (f"{fmt.clock(number(entry, 'at_unix_s'))} ", "dim"),
        (f"{text(entry, 'source') or '':<7}", "title"),
        (f"{word:<6}", role),
        (f"{_short(text(entry, 'logger') or ''):<22} " if loggers else "", "dim"),
    )
    lines = [head + first, *(line(" " * indent) + one for one in more[: most - 1])]
    if len(more) >= most:
        lines.append(line((f"{'':<{indent}}{len(more) - most + 1} more lines", "dim")))
    return lines


def _level(level: float) -> tuple[str, str]:
    return next((word, role) for least, word, role in _LEVELS if level >= least)


def _short(logger: str) -> str:
    parts = logger.removeprefix("hisparsed.").split(".")
    return ".".join(parts[-2:])[:22]


def _words(entry: Document) -> str:
    return f"{text(entry, 'text') or ''} {text(entry, 'logger') or ''}".lower()
