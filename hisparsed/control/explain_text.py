"""Decisions and events as lines that a person reads, oldest first, with the figures. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from hisparsed.control.records import DecisionView, EventView
from hisparsed.control.status_text import clock_text, setting_text
from hisparsed.policy.reasons import Lever
from hisparsed.policy.units import format_bytes, format_duration, format_fraction

_WIDTH = 100
_LEAST_WIDTH = 40
_INDENT = "    "
_NAMES = {"gpu": "GPU", "pcie": "PCIe", "hisparse": "HiSparse"}


def explanation(
    decisions: Iterable[DecisionView], events: Iterable[EventView], *, width: int = _WIDTH
) -> str:
    """Both in order of time, ending in a newline; empty when there is nothing.

    Sentences are wrapped to ``width`` columns.
    """
    width = max(width, _LEAST_WIDTH)
    order = list(Lever)
    entries = [
        ((one.at_unix_s, one.sequence, order.index(one.lever)), list(_decision(one, width)))
        for one in decisions
    ]
    entries += [((one.at_unix_s, one.sequence, 0), list(_event(one, width))) for one in events]
    entries.sort(key=lambda entry: entry[0])
    return "".join(f"{line}\n" for _, lines in entries for line in lines)


def _decision(view: DecisionView, width: int) -> Iterator[str]:
    limited = f", {view.limited_by}" if view.limited_by not in (None, view.code) else ""
    mark = "moved" if view.acts else "held"
    if view.error is not None:
        mark = "failed"
    yield f"{clock_text(view.at_unix_s)}  {view.lever}  {mark}  {view.code}{limited}"
    yield from _wrapped(view.sentence, width)
    if view.error is not None:
        yield from _wrapped(f"The engine refused: {view.error}.", width)
    if view.in_force is not None:
        yield from _wrapped(f"The engine bounded it to {setting_text(view.in_force)}.", width)
    if view.figures:
        yield from _wrapped(figures_text(view.figures), width)


def _event(view: EventView, width: int) -> Iterator[str]:
    yield f"{clock_text(view.at_unix_s)}  {view.kind}  by {view.actor}"
    for line in view.sentence.splitlines():
        # What shows a line of a document, with a mark below it, is left as it is.
        yield from [f"{_INDENT}{line}"] if line.startswith("  ") else _wrapped(line, width)


def figures_text(figures: Mapping[str, float | None]) -> str:
    """Names in words, each value in the unit that its name ends in."""
    return ", ".join(_figure(name, value) for name, value in figures.items())


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return f"{_words(name)} unlimited"
    if name.endswith("_bytes_per_s"):
        return f"{_words(name.removesuffix('_bytes_per_s'))} {format_bytes(round(value))}/s"
    if name.endswith("_per_s"):
        return f"{_words(name.removesuffix('_per_s'))} {_number(value)}/s"
    if name.endswith("_bytes"):
        return f"{_words(name.removesuffix('_bytes'))} {format_bytes(round(value))}"
    for seconds in ("_seconds", "_s"):
        if name.endswith(seconds):
            return f"{_words(name.removesuffix(seconds))} {format_duration(value)}"
    if name.endswith("_ratio"):
        return f"{_words(name.removesuffix('_ratio'))} {format_fraction(value)}"
    return f"{_words(name)} {_number(value)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def _words(name: str) -> str:
    return " ".join(_NAMES.get(word, word) for word in name.split("_"))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
