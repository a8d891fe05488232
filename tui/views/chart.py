"""Charts of one series over several rows of characters, with its last, least and most value."""

from __future__ import annotations

from collections.abc import Sequence

from hisparsed.tui import format as fmt
from hisparsed.tui.glyphs import Glyphs
from hisparsed.tui.history import SERIES, History, known
from hisparsed.tui.styled import Line, block, ends, line
from hisparsed.tui.views.context import ViewContext

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
    history: History, name: str, width: int, context: ViewContext
) -> list[float | None]:
    """One value a column; columns stand at fixed times, so that a chart does not flicker."""
    if width < 1 or history.newest_s is None:
        return [None] * max(0, width)
    step_s = context.span_s / width
    end_s = (history.newest_s // step_s) * step_s
    return history.buckets(name, context.span_s, width, end_s=end_s)


def now_value(history: History, name: str) -> str:
    """The series over the last seconds, as text."""
    return UNITS[SERIES[name].unit](history.latest(name, _NOW_WINDOW_S))


def chart(history: History, name: str, width: int, height: int, context: ViewContext) -> list[Line]:
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
    history: History, name: str, width: int, context: ViewContext, *, title_width: int = 15
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
