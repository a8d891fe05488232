"""Bars that split a whole into parts. What is not zero shows; the parts never exceed the bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.tui.styled import Line, line


@dataclass(frozen=True, slots=True)
class Segment:
    """``amount`` of the whole, drawn with one character and one role."""

    amount: float
    glyph: str
    role: str


def cells_of(amounts: Sequence[float], total: float, width: int) -> list[int]:
    """Cells a part: rounded by the largest remainder, at least one for what is not zero."""
    if total <= 0 or width <= 0:
        return [0] * len(amounts)
    # Parts of more than the whole share the bar.
    total = max(total, sum(max(0.0, amount) for amount in amounts))
    exact = [max(0.0, amount) / total * width for amount in amounts]
    cells = [max(int(share), 1) if share > 0 else 0 for share in exact]
    filled = min(width, round(sum(exact)))
    by_remainder = sorted(
        range(len(exact)), key=lambda index: exact[index] - int(exact[index]), reverse=True
    )
    for index in by_remainder:
        if sum(cells) >= filled:
            break
        if exact[index] > cells[index]:
            cells[index] += 1
    while sum(cells) > width:
        cells[max(range(len(cells)), key=lambda index: cells[index])] -= 1
    return cells


def bar(segments: Sequence[Segment], total: float, width: int, *, free: str) -> Line:
    """A line of exactly ``width`` cells."""
    cells = cells_of([segment.amount for segment in segments], total, width)
    parts = [
        (segment.glyph * count, segment.role)
        for segment, count in zip(segments, cells, strict=True)
    ]
    return line(*parts, (free * (width - sum(cells)), "free"))


def gauge(share: float | None, width: int, glyph: str, role: str, *, free: str) -> Line:
    """One part of a whole; nothing when it is not known."""
    return bar([Segment(min(1.0, share or 0.0), glyph, role)], 1.0, width, free=free)


def marks(places: Sequence[tuple[float, str, str]], width: int) -> Line:
    """``(share of the bar, character, role)`` above or below a bar; later ones win."""
    row: list[tuple[str, str]] = [(" ", "")] * width
    for share, glyph, role in places:
        at = min(width - 1, max(0, int(share * width)))
        row[at] = (glyph, role)
    return line(*row)
