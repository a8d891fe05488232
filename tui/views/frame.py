"""Boxes with a title around lines, and boxes next to and above each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hisparsed.tui.glyphs import Glyphs
from hisparsed.tui.styled import Line, block, line


def box(title: str, lines: Sequence[Line], width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Exactly ``width`` by ``height`` cells; what does not fit inside is cut."""
    top_left, top_right, bottom_left, bottom_right, across, down = glyphs.frame
    inside = width - 4
    label = f" {title} " if title else ""
    label = label[: max(0, width - 4)]
    top = line(
        (top_left + across, "frame"),
        (label, "title"),
        (across * (width - 3 - len(label)) + top_right, "frame"),
    )
    bottom = line((bottom_left + across * (width - 2) + bottom_right, "frame"))
    body = [
        line((down + " ", "frame")) + one + line((" " + down, "frame"))
        for one in block(lines, inside, height - 2)
    ]
    return [top, *body, bottom]


def split_width(width: int, shares: Sequence[int]) -> list[int]:
    """``width`` in parts of these shares, without a rest."""
    total = sum(shares)
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + share)
    places = [width * edge // total for edge in edges]
    return [end - begin for begin, end in pairwise(places)]
