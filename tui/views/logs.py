"""Log lines of daemon and engine, and the health of the node: doctor, canary, journal, link."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, line, wrap
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import Document, dig, items, number, text

_LEVELS = ((40, "ERROR", "bad"), (30, "WARN", "warn"), (20, "info", ""), (0, "debug", "dim"))
_STEPS = (0, 20, 30, 40)
_SOURCES = (None, "daemon", "engine")
_LOGGERS_WIDTH = 110
_MOST_LINES = 30
NOT_AVAILABLE = "not available in this version"


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
        word, role = _level(number(entry, "level") or 0)
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
        lines += [line(" " * indent) + one for one in more[: _MOST_LINES - 1]]
        if len(more) >= _MOST_LINES:
            lines.append(line((f"{'':<{indent}}{len(more) - _MOST_LINES + 1} more lines", "dim")))
    return lines


def health_lines(model: NodeModel, context: ViewContext) -> list[Line]:
    """What doctor and canary found, the journal's state, and how it stands with the node."""
    status, glyphs = model.status, context.glyphs
    writing = dig(status, "journal.writing")
    if writing is None:
        unknown = line((f"{'journal':<9}", "title"), ("not known", "dim"))
        return [*_doctor(status), _canary(status, context), unknown]
    state = f"{glyphs.on} writing" if writing else f"{glyphs.off} STOPPED"
    journal = line(
        (f"{'journal':<9}", "title"),
        (state, "good" if writing else "bad"),
        f", {fmt.whole(number(status, 'journal.written'))} records, "
        f"{fmt.whole(number(status, 'journal.dropped'))} dropped",
        (f": {text(status, 'journal.error')}" if text(status, "journal.error") else "", "bad"),
    )
    return [*_doctor(status), _canary(status, context), journal]


def _doctor(status: object) -> list[Line]:
    title = (f"{'doctor':<9}", "title")
    if dig(status, "doctor") is None:
        return [line(title, (NOT_AVAILABLE, "dim"))]
    findings = items(status, "doctor.findings")
    if not findings:
        return [line(title, ("no findings", "good"))]
    return [
        line(
            title,
            (f"{one.get('severity', 'finding')}: ", "bad" if _grave(one) else "warn"),
            (f"{one.get('code', '')} ", "strong"),
            str(one.get("sentence", "")),
        )
        for one in findings
    ]


def _grave(finding: Document) -> bool:
    return str(finding.get("severity")) in ("error", "bad", "critical")


def _canary(status: object, context: ViewContext) -> Line:
    title = (f"{'canary':<9}", "title")
    state = text(status, "canary.state")
    if state is None:
        return line(title, (NOT_AVAILABLE, "dim"))
    good = state in ("ok", "passing", "equal")
    mark = context.glyphs.on if good else context.glyphs.off
    role = "good" if good else "dim" if state in ("off", "waiting") else "bad"
    return line(
        title,
        (f"{mark} {state}", role),
        f"  {text(status, 'canary.sentence') or ''}",
    )


def _level(level: float) -> tuple[str, str]:
    return next((word, role) for least, word, role in _LEVELS if level >= least)


def _short(logger: str) -> str:
    parts = logger.removeprefix("hisparsed.").split(".")
    return ".".join(parts[-2:])[:22]


def _words(entry: Document) -> str:
    return f"{text(entry, 'text') or ''} {text(entry, 'logger') or ''}".lower()
