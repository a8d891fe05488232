"""The means to draw pages: characters, time and the span of charts; bars, boxes and charts.

Bars, charts and frames are made of Unicode characters, or of ASCII for plain terminals. Every state
has its own character, so that a bar reads without colour. A bar splits a whole into parts: every
part above zero is visible, and the parts never exceed the bar. A gauge shows one share, in eighths
of a cell. A chart draws one series over several rows between its axes: from zero to its highest
value, and from one time of day to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hisparsed.tui import format as fmt
from hisparsed.tui.format import UNKNOWN
from hisparsed.tui.history import SERIES, WINDOW_S, ChartHistory, is_difference, known
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, block, line
from hisparsed.tui.wire import number


@dataclass(frozen=True, slots=True)
class Glyphs:
    levels: str
    """From an empty to a full cell, for charts."""
    parts: str
    """Parts of a cell from the left, rising, for gauges; empty where there are only whole ones."""
    axis: tuple[str, str]
    """Vertical axis, and the same where it has a label."""
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
    parts="▏▎▍▌▋▊▉",
    axis=("│", "┤"),
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
    parts="",
    axis=("|", "+"),
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
"""Spans that charts can show; a key goes from one to the next."""


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
    """Cells per part: rounded by the largest remainder, at least one for parts above zero."""
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


def gauge(share: float | None, width: int, role: str, glyphs: Glyphs) -> Line:
    """A share of a whole to the nearest part of a cell: a very small share is empty."""
    steps = len(glyphs.parts) + 1
    filled = round(min(1.0, max(0.0, share or 0.0)) * width * steps)
    cells, rest = divmod(filled, steps)
    drawn = glyphs.in_use * cells + (glyphs.parts[rest - 1] if rest else "")
    return line((drawn, role), (glyphs.free * (width - len(drawn)), "free"))


def marks(places: Sequence[tuple[float, str, str]], width: int) -> Line:
    """``(share of the bar, character, role)`` above or below a bar; later ones win."""
    row: list[tuple[str, str]] = [(" ", "")] * width
    for share, glyph, role in places:
        at = min(width - 1, max(0, int(share * width)))
        row[at] = (glyph, role)
    return line(*row)


def box(title: str, lines: Sequence[Line], width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Exactly ``width`` by ``height`` cells; longer content is cut."""
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
    "per_s": lambda value: UNKNOWN if value is None else f"{fmt.short(value)}/s",
    "share": lambda value: fmt.percent(value, 1),
    "bytes": fmt.size,
    "bytes/s": fmt.per_second,
    "seconds": fmt.duration,
    "ratio": fmt.ratio,
    "times": fmt.multiplier,
}
WINDOW = f"in {fmt.span(WINDOW_S)}"
"""The window, next to a number that is a rate or a ratio."""


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
    """One value per column; all but the last are at fixed times, so that a chart does not
    flicker. The last one is up to now."""
    if width < 1 or history.newest_s is None:
        return [None] * max(0, width)
    step_s = context.span_s / width
    end_s = (history.newest_s // step_s) * step_s
    earlier = history.buckets(name, context.span_s - step_s, width - 1, end_s=end_s)
    return [*earlier, history.latest(name, step_s)]


def now_value(model: NodeModel, name: str) -> str:
    """The series now as text: a gauge as the status has it, a rate or ratio over ``WINDOW_S``."""
    series = SERIES[name]
    if is_difference(name):
        return UNITS[series.unit](model.history.latest(name))
    return UNITS[series.unit](number(model.status, series.top))


def now_gauge(model: NodeModel, name: str) -> list[float]:
    """A gauge's value now, which its last column may not include yet; ``None`` for others."""
    value = None if is_difference(name) else number(model.status, SERIES[name].top)
    return [] if value is None else [value]


_AXIS_LABEL = 9
"""Most cells that the label of a vertical axis takes."""


def chart_box(
    model: NodeModel, name: str, width: int, height: int, context: ViewContext
) -> list[Line]:
    """A frame with the series' name and value; inside, its past between two axes."""
    series, inside, glyphs = SERIES[name], width - 4, context.glyphs
    show = UNITS[series.unit]
    window = f" {WINDOW}" if is_difference(name) else ""
    title = f"{series.title} {now_value(model, name)}{window}"
    rows = max(1, height - 3)
    label = _AXIS_LABEL
    values = series_values(model.history, name, inside - label - 1, context)
    found = known(values)
    if not found:
        return box(title, [line(("no data in this time", "dim"))], width, height, glyphs)
    most = max(found + now_gauge(model, name))
    drawn = columns(values, rows, most or 1.0, glyphs)
    plain, labelled = glyphs.axis
    lines = []
    for index, row in enumerate(drawn):
        words = show(most) if index == 0 and most else "0" if index == rows - 1 else ""
        mark = labelled if words else plain
        head = f"{words[:label]:>{label}}"
        lines.append(line((head, "dim"), (mark, "frame"), (row, "chart")))
    lines.append(time_axis(label + 1, inside, model.history.newest_s, context))
    return box(title, lines, width, height, glyphs)


def time_axis(indent: int, width: int, end_s: float | None, context: ViewContext) -> Line:
    """The times of day at both ends of a chart, and the span between them."""
    room = width - indent
    begin = None if end_s is None else end_s - context.span_s
    left, right = fmt.minute(begin), fmt.minute(end_s)
    between = f" {fmt.span(context.span_s)} ".center(max(0, room - len(left) - len(right)))
    words = f"{left}{between}{right}" if room >= len(left) + len(right) + 5 else right.rjust(room)
    return line(" " * indent, (words[:room], "dim"))


_SPARK_TITLE = 15
_SPARK_VALUE = 12
SPARK_MOST = 14


def spark(model: NodeModel, name: str, width: int, context: ViewContext) -> Line:
    """Title, value now, one row of chart and its highest value in one line."""
    series = SERIES[name]
    head = f"{series.title:<{_SPARK_TITLE}}"
    value = f"{now_value(model, name):>{_SPARK_VALUE}} "
    room = width - len(head) - len(value) - SPARK_MOST
    values = series_values(model.history, name, room, context)
    found = known(values)
    most = max(found + now_gauge(model, name), default=0.0)
    words = f"max {UNITS[series.unit](most)}" if found else "no data"
    return line(
        (head, "title"),
        (value, "strong"),
        (columns(values, 1, most or 1.0, context.glyphs)[0], "chart"),
        (f"{words:>{SPARK_MOST}}", "dim"),
    )


def spark_axis(model: NodeModel, width: int, context: ViewContext) -> Line:
    """The time axis under sparks; the window of their numbers is below the numbers."""
    head = f"rates {WINDOW}"
    indent = _SPARK_TITLE + _SPARK_VALUE + 1
    axis = time_axis(0, width - indent - SPARK_MOST, model.history.newest_s, context)
    return line((f"{head:<{indent}}", "dim")) + axis
