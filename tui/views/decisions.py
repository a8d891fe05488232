"""The journal as rows: decisions and events, filtered, newest first; and one of them whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.levers import LEVERS, setting_text
from hisparsed.tui.wire import Document, dig, number, text

_VALUE = len("held-prefix-first")


@dataclass(frozen=True, slots=True)
class Filter:
    """``None`` and empty let everything pass. Events are left out where lever or code is set."""

    lever: str | None = None
    code: str | None = None
    search: str = ""
    every_tick: bool = False

    def passes(self, entry: Document) -> bool:
        if is_event(entry):
            if self.lever is not None or self.code is not None:
                return False
        else:
            if self.lever not in (None, entry.get("lever")):
                return False
            if self.code not in (None, entry.get("code")):
                return False
            if not self.every_tick and not (entry.get("notable") or entry.get("acts")):
                return False
        return not self.search or self.search.lower() in _words(entry)

    def next_lever(self) -> Filter:
        choices = (None, *LEVERS)
        return replace(self, lever=choices[(choices.index(self.lever) + 1) % len(choices)])

    @property
    def words(self) -> str:
        parts = [
            self.lever or "all levers",
            self.code or "all codes",
            "every tick" if self.every_tick else "moves and new reasons",
        ]
        if self.search:
            parts.append(f'"{self.search}"')
        return ", ".join(parts)


def is_event(entry: Document) -> bool:
    return "kind" in entry and "lever" not in entry


def codes(model: NodeModel) -> list[str]:
    """Those that occur, in alphabetical order."""
    return sorted({str(one["code"]) for one in model.decisions if one.get("code")})


def entries(model: NodeModel, wanted: Filter) -> list[Document]:
    """What passes, newest first."""
    merged = sorted(
        [*model.decisions, *model.events],
        key=lambda one: (number(one, "at_unix_s") or 0.0, number(one, "sequence") or 0.0),
        reverse=True,
    )
    return [one for one in merged if wanted.passes(one)]


def moves(model: NodeModel, count: int) -> list[Document]:
    """The latest decisions that act, and events; both rings are newest first."""
    heads = [
        *islice((one for one in model.decisions if one.get("acts")), count),
        *islice(model.events, count),
    ]
    heads.sort(key=lambda one: number(one, "at_unix_s") or 0.0, reverse=True)
    return heads[:count]


def entry_line(
    model: NodeModel, entry: Document, context: ViewContext, *, values: bool = True
) -> Line:
    """Time, what, whether it moved, why, and the sentence; ``values`` in a column of their own."""
    at = fmt.clock(number(entry, "at_unix_s"))
    if is_event(entry):
        kind = text(entry, "kind") or ""
        bad = kind in ("policy-rejected", "report-failed", "tick-failed", "engine-gone")
        return line(
            (f"{at}  ", "dim"),
            (f"{'event':<11}", "title"),
            (f"{kind:<22} ", "bad" if bad else "accent"),
            text(entry, "sentence") or "",
        )
    acts, error = bool(entry.get("acts")), text(entry, "error")
    state = "FAILED" if error else "moved" if acts else "held"
    lever = text(entry, "lever") or ""
    return line(
        (f"{at}  ", "dim"),
        (f"{lever:<11}", "title"),
        (f"{state:<7}", "bad" if error else "good" if acts else "dim"),
        (f"{text(entry, 'code') or '':<20} ", "accent" if acts else ""),
        (
            f"{_change(model, entry, context):<{_VALUE}} " if values else "",
            "strong" if acts else "dim",
        ),
        text(entry, "sentence") or "",
    )


def entry_titles(*, values: bool) -> str:
    head = f"{'time':<10}{'lever':<11}{'':<7}{'code':<21}"
    return head + (f"{'value':<{_VALUE + 1}}why" if values else "why")


def _change(model: NodeModel, entry: Document, context: ViewContext) -> str:
    lever = text(entry, "lever") or ""
    current, wanted = dig(entry, "current"), dig(entry, "wanted")
    if lever == "admission":
        return fmt.setting(wanted)[:_VALUE]
    short = setting_text(model, lever, current).partition(" (")[0]
    if current == wanted:
        return short
    return f"{short}{context.glyphs.arrow}{setting_text(model, lever, wanted).partition(' (')[0]}"


def _words(entry: Document) -> str:
    names = ("kind", "lever", "code", "cause", "limited_by", "sentence", "actor")
    return " ".join(str(entry.get(name) or "") for name in names).lower()
