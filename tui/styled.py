"""Lines of text whose parts have roles; a theme decides what a role looks like.

Pure, and the same for the screen and for ``--once``: colour is never needed to read a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

Part = str | tuple[str, str]
"""Text, or text with a role of ``themes.ROLES``."""

# Also characters that change the direction of text: they would reorder the rest of the line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line; never holds control characters, whatever the node sent."""

    spans: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.spans)

    @property
    def cells(self) -> int:
        return sum(cell_len(text) for text, _ in self.spans)

    def __add__(self, other: Line) -> Line:
        return Line(self.spans + other.spans)


EMPTY = Line()
_IN_ASCII = str.maketrans(
    {"…": "~", "→": ">", "\u00d7": "x", "\u2013": "-", "\u2014": "-", "\u2019": "'"}
)


def ascii_line(text: Line) -> Line:
    """The same line in ASCII; characters without an equivalent are question marks.

    One character stays one cell, so that columns keep their places; a wide one becomes two.
    """
    return Line(tuple((_ascii(part), role) for part, role in text.spans))


def _ascii(part: str) -> str:
    if part.isascii():
        return part
    translated = part.translate(_IN_ASCII)
    return "".join(one if one.isascii() else "?" * cell_len(one) for one in translated)


def line(*parts: Part) -> Line:
    """A line of its parts; empty ones are omitted."""
    spans = []
    for part in parts:
        text, role = (part, "") if isinstance(part, str) else part
        if text:
            spans.append((_CONTROL.sub(" ", text), role))
    return Line(tuple(spans))


def fit(text: Line, width: int, *, more: str = "…") -> Line:
    """Exactly ``width`` cells: padded, or cut with ``more`` at the end."""
    if width <= 0:
        return EMPTY
    cells = text.cells
    if cells == width:
        return text
    if cells < width:
        return Line((*text.spans, (" " * (width - cells), "")))
    room, spans = width - cell_len(more), []
    for part, role in text.spans:
        length = cell_len(part)
        if length > room:
            spans.append((set_cell_size(part, room), role))
            spans.append((more, "dim"))
            break
        spans.append((part, role))
        room -= length
    return Line(tuple(spans))


def within(text: Line, width: int) -> Line:
    """At most ``width`` cells; a cut line ends in a mark."""
    return text if text.cells <= width else fit(text, width)


def drop(text: Line, cells: int) -> Line:
    """Without the first ``cells`` cells."""
    spans, left = [], cells
    for part, role in text.spans:
        length = cell_len(part)
        if left >= length:
            left -= length
            continue
        spans.append((part[left:], role))
        left = 0
    return Line(tuple(spans))


def ends(left: Line, right: Line, width: int) -> Line:
    """``left`` at the left and ``right`` at the right end, a space between; ``left`` is cut if
    necessary."""
    if right.cells >= width - 1:
        return fit(right, width)
    return fit(left, width - right.cells - 1) + line(" ") + right


def wrap(text: str, width: int, role: str = "") -> list[Line]:
    """Words over as many lines as they need; a word longer than a line is split."""
    lines: list[Line] = []
    for raw in text.splitlines() or [""]:
        paragraph, current = _CONTROL.sub(" ", raw), ""
        for word in paragraph.split(" "):
            candidate = f"{current} {word}" if current else word
            if cell_len(candidate) <= width:
                current = candidate
                continue
            if current:
                lines.append(line((current, role)))
            rest = word
            while cell_len(rest) > width > 0:
                head = set_cell_size(rest, width)
                lines.append(line((head, role)))
                rest = rest[len(head.rstrip()) :]
            current = rest
        lines.append(line((current, role)))
    return lines


def wrap_line(text: Line, width: int, indent: int) -> list[Line]:
    """``text`` over as many lines as it needs, broken between words; what does not fit on the
    first continues after ``indent`` cells. Roles stay."""
    lines, rest, room, head = [], text, width, EMPTY
    while rest.cells > room:
        cells = _break_at(rest.plain, room)
        lines.append(head + fit(rest, cells, more=""))
        rest = _without_spaces(drop(rest, cells))
        head, room = line(" " * indent), max(8, width - indent)
    return [*lines, head + rest]


def _break_at(text: str, room: int) -> int:
    """Cells of the words that fit into ``room``; all of it where the first word does not fit."""
    fits = set_cell_size(text, room)
    if text[len(fits) : len(fits) + 1] == " ":
        return room
    words = fits.rstrip(" ").rpartition(" ")[0]
    return cell_len(words.rstrip(" ")) or room


def _without_spaces(text: Line) -> Line:
    """Without those at its start."""
    return drop(text, len(text.plain) - len(text.plain.lstrip(" ")))


def hanging(head: Line, text: str, width: int, role: str = "") -> list[Line]:
    """``text`` after ``head``; what does not fit continues below itself."""
    first, *more = wrap(text, max(8, width - head.cells), role)
    indent = line(" " * head.cells)
    return [head + first, *(indent + one for one in more)]


def block(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Exactly ``height`` lines of ``width`` cells."""
    padded = [fit(one, width) for one in lines[:height]]
    return padded + [fit(EMPTY, width)] * (height - len(padded))


def beside(blocks: Iterable[Sequence[Line]]) -> list[Line]:
    """Blocks of equal height next to each other; the shortest sets the height."""
    joined = []
    for parts in zip(*blocks, strict=False):
        whole = EMPTY
        for part in parts:
            whole += part
        joined.append(whole)
    return joined
