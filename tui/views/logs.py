"""Log lines of daemon and engine, filtered."""

from __future__ import annotations

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
"""Statistics that vLLM writes every ten seconds must not fill the page."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    level: int = 20
    source: str | None = None
    search: str = ""

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
        return ", ".join(part for part in parts if part)


def log_entries(model: NodeModel, wanted: LogFilter) -> int:
    """How many entries pass."""
    return sum(wanted.passes(entry) for entry in model.logs)


def log_lines(model: NodeModel, wanted: LogFilter, width: int) -> list[Line]:
    """Oldest first; long ones go over several lines, and past some they are cut."""
    loggers = width >= _LOGGERS_WIDTH
    indent = 22 + (23 if loggers else 0)
    lines: list[Line] = []
    for entry in model.logs:
        if not wanted.passes(entry):
            continue
        level = number(entry, "level") or 0
        most = _MOST_LINES if level >= _WARNING else _MOST_LINES_OF_INFO
        word, role = _level(level)
        first, *more = wrap(text(entry, "text") or "", max(20, width - indent - 1), role)
        lines.append(
            line(
                (f"{fmt.clock(number(entry, 'at_unix_s'))} ", "dim"),
                (f"{text(entry, 'source') or '':<7}", "title"),
                (f"{word:<6}", role),
                (f"{_short(text(entry, 'logger') or ''):<22} " if loggers else "", "dim"),
            )
            + first
        )
        lines += [line(" " * indent) + one for one in more[: most - 1]]
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
