"""What pages are drawn with: characters, time and the span of charts; bars, boxes and charts.

Bars, charts and frames are made of Unicode characters, or of ASCII for plain terminals. Every state
has a character of its own, so that a bar reads without colour. A bar splits a whole into parts:
what is not zero shows, and the parts never exceed the bar. A chart draws one series over several
rows, with its last and its highest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hisparsed.tui import format as fmt
from hisparsed.tui.history import SERIES, ChartHistory, known
from hisparsed.tui.styled import Line, block, ends, line


@dataclass(frozen=True, slots=True)
class Glyphs:
    levels: str
    """From nothing to a full cell, for charts."""
    in_use: str
    reusable: str
    free: str
    boundary: str
    target: str
    other_target: str
    frame: tuple[str, str, str, str, str, str]
    """Corners (top left, top right, bottom left, bottom right), horizontal, vertical."""
    more: str
    arrow: str
    sort_up: str
    sort_down: str
    on: str
    off: str
    dot: str


UNICODE = Glyphs(
    levels=" ▁▂▃▄▅▆▇█",
    in_use="█",
    reusable="▒",
    free="·",
    boundary="┃",
    target="▼",
    other_target="▽",
    frame=("╭", "╮", "╰", "╯", "─", "│"),
    more="…",
    arrow="→",
    sort_up="▲",
    sort_down="▼",
    on="●",
    off="○",
    dot="·",
)
ASCII = Glyphs(
    levels=" .:-=+*%#",
    in_use="#",
    reusable="=",
    free=".",
    boundary="|",
    target="v",
    other_target="y",
    frame=("+", "+", "+", "+", "-", "|"),
    more="~",
    arrow="->",
    sort_up="^",
    sort_down="v",
    on="*",
    off="o",
    dot="-",
)


SPANS_S = (300.0, 900.0, 3_600.0, 7_200.0)
"""What charts can show; a key goes from one to the next."""


@dataclass(frozen=True, slots=True)
class ViewContext:
    glyphs: Glyphs = UNICODE
    now_s: float = 0.0
    """This machine's Unix time; a recorded journal's own time while one is shown."""
    span_s: float = SPANS_S[0]


@dataclass(frozen=True, slots=True)
class BarSegment:
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


def bar(segments: Sequence[BarSegment], total: float, width: int, *, free: str) -> Line:
    """A line of exactly ``width`` cells."""
    cells = cells_of([segment.amount for segment in segments], total, width)
    parts = [
        (segment.glyph * count, segment.role)
        for segment, count in zip(segments, cells, strict=True)
    ]
    return line(*parts, (free * (width - sum(cells)), "free"))


def gauge(share: float | None, width: int, glyph: str, role: str, *, free: str) -> Line:
    """One part of a whole; nothing when it is not known."""
    return bar([BarSegment(min(1.0, share or 0.0), glyph, role)], 1.0, width, free=free)


def marks(places: Sequence[tuple[float, str, str]], width: int) -> Line:
    """``(share of the bar, character, role)`` above or below a bar; later ones win."""
    row: list[tuple[str, str]] = [(" ", "")] * width
    for share, glyph, role in places:
        at = min(width - 1, max(0, int(share * width)))
        row[at] = (glyph, role)
    return line(*row)


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


UNITS = {
    "count": fmt.short,
    "share": lambda value: fmt.percent(value, 1),
    "bytes": fmt.size,
    "bytes/s": fmt.per_second,
    "seconds": fmt.duration,
    "ratio": fmt.ratio,
    "times": fmt.multiplier,
}
_NOW_WINDOW_S = 10.0


def columns(values: Sequence[float | None], height: int, top: float, glyphs: Glyphs) -> list[str]:
    """``height`` rows, the topmost first; a gap is blank, anything above zero shows."""
    steps = len(glyphs.levels) - 1
    heights = [
        None
        if value is None
        else max(0 if value <= 0 else 1, min(steps * height, round(value / top * steps * height)))
        for value in values
    ]
    return [
        "".join(
            " " if level is None else glyphs.levels[max(0, min(steps, level - row * steps))]
            for level in heights
        )
        for row in range(height - 1, -1, -1)
    ]


def series_values(
    history: ChartHistory, name: str, width: int, context: ViewContext
) -> list[float | None]:
    """One value a column; columns stand at fixed times, so that a chart does not flicker."""
    if width < 1 or history.newest_s is None:
        return [None] * max(0, width)
    step_s = context.span_s / width
    end_s = (history.newest_s // step_s) * step_s
    return history.buckets(name, context.span_s, width, end_s=end_s)


def now_value(history: ChartHistory, name: str) -> str:
    """The series over the last seconds, as text."""
    return UNITS[SERIES[name].unit](history.latest(name, _NOW_WINDOW_S))


def chart(
    history: ChartHistory, name: str, width: int, height: int, context: ViewContext
) -> list[Line]:
    """A title line and ``height - 1`` rows of chart."""
    series = SERIES[name]
    show = UNITS[series.unit]
    values = series_values(history, name, width, context)
    found = known(values)
    most = max(found, default=0.0)
    title = line((series.title, "title"), " ", (now_value(history, name), "strong"))
    extent = line((f"max {show(most)}", "dim")) if found else line(("no data", "dim"))
    rows = columns(values, height - 1, most or 1.0, context.glyphs)
    return block(
        [ends(title, extent, width), *(line((row, "chart")) for row in rows)], width, height
    )


def spark(
    history: ChartHistory, name: str, width: int, context: ViewContext, *, title_width: int = 15
) -> Line:
    """Title, current value and one row of chart in one line."""
    series = SERIES[name]
    head = f"{series.title:<{title_width}}{now_value(history, name):>11} "
    values = series_values(history, name, width - len(head), context)
    most = max(known(values), default=0.0) or 1.0
    return line(
        (head[:title_width], "title"),
        (head[title_width:], "strong"),
        (columns(values, 1, most, context.glyphs)[0], "chart"),
    )
