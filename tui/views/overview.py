"""The first page: the state in words, and the figures that support it.

The layout depends on the size. A small screen shows the most important parts; charts need room.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, beside, block, fit, line, wrap_line
from hisparsed.tui.views.decisions import SENTENCE_AT, entry_line, moves
from hisparsed.tui.views.drawing import (
    WINDOW,
    ViewContext,
    box,
    chart_box,
    spark,
    spark_axis,
    split_width,
)
from hisparsed.tui.views.health import gpus_line
from hisparsed.tui.views.panels import (
    gpu_lines,
    host_compact,
    host_lines,
    hot_compact,
    hot_lines,
    request_lines,
    service_lines,
)
from hisparsed.tui.views.policy import lever_lines
from hisparsed.tui.views.verdict import verdict_lines
from hisparsed.tui.wire import number

MEDIUM_WIDTH = 118
WIDE_WIDTH = 180
_COMPACT_CHARTS = ("waiting", "tokens", "ttft", "miss", "prefix", "h2d", "running", "coverage")
_CHARTS = (
    "waiting", "tokens", "ttft", "prefix", "miss", "coverage", "h2d", "running", "offload", "itl",
    "multiplier", "gpu_free",
)  # fmt: skip
_LEAST_CHART = 5
"""Rows of a framed chart: frame, two of chart, the time axis."""


def overview_lines(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    """Exactly ``height`` lines of ``width`` cells."""
    words = verdict_lines(model, width, context)
    room = height - len(words)
    if model.status is None:
        figures: list[Line] = []
    elif width >= WIDE_WIDTH:
        figures = _wide(model, width, room, context)
    elif width >= MEDIUM_WIDTH:
        figures = _medium(model, width, room, context)
    else:
        figures = _compact(model, width, room, context)
    return block([*words, *figures], width, height)


@dataclass(frozen=True, slots=True)
class _Part:
    """Lines that belong together; parts with a higher ``worth`` are placed first."""

    worth: int
    lines: list[Line]


def _compact(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    """No frames: a title before each part, and as many parts as fit."""
    requests = request_lines(model, width, context)
    budget = f"host memory {fmt.size(_budget(model))}"
    axis = spark_axis(model, width, context)
    first, *sparks = (spark(model, name, width, context) for name in _COMPACT_CHARTS)
    parts = [
        _Part(9, [_rule(budget, width, context), *host_compact(model, width, context)]),
        _Part(7, gpu_lines(model, width, context)),
        _Part(2, [_rule("calls and hot buffers", width, context), requests[0]]),
        _Part(3, requests[1:2]),
        _Part(5, hot_compact(model, width, context)),
        _Part(4, service_lines(model, width)),
        _Part(6, [first, axis]),
        _Part(1, [_rule("levers", width, context)]),
        _Part(8, lever_lines(model, width, context)),
    ]
    placed: set[int] = set()
    room = height
    for index in sorted(range(len(parts)), key=lambda index: parts[index].worth, reverse=True):
        if len(parts[index].lines) <= room:
            placed.add(index)
            room -= len(parts[index].lines)
    lines: list[Line] = []
    for index, part in enumerate(parts):
        if index in placed:
            lines += part.lines
            if axis in part.lines:
                lines[-1:-1] = sparks[:room]
    return lines


def _medium(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    left, right = split_width(width, (1, 1))
    lines = beside([_host(model, left, context), _calls(model, right, context)])
    levers = lever_lines(model, right - 4, context)
    lines += beside(
        [_hot(model, left, 7, context), box("levers", levers, right, 7, context.glyphs)]
    )
    lines += gpus_line(model, width, context)
    journal_rows = 6 if height - len(lines) >= 6 + _LEAST_CHART else 0
    room = height - len(lines) - journal_rows
    lines += _chart_grid(model, width, room, 3, context)
    if journal_rows:
        lines += _journal_box(model, width, journal_rows, context)
    return lines


def _wide(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    one, two, three = split_width(width, (1, 1, 1))
    lines = beside(
        [_host(model, one, context), _calls(model, two, context), _hot(model, three, 8, context)]
    )
    lines += gpus_line(model, width, context)
    rest = height - len(lines)
    lower = min(14, max(0, rest // 3))
    lines += _chart_grid(model, width, rest - lower, 4, context)
    if lower:
        lever_width, journal_width = split_width(width, (2, 3))
        rows = max(1, (lower - 2) // 4)
        levers = lever_lines(model, lever_width - 4, context, rows=rows)
        lines += beside(
            [
                box("levers", levers, lever_width, lower, context.glyphs),
                _journal_box(model, journal_width, lower, context),
            ]
        )
    return lines


def _host(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    title = f"host memory {fmt.size(_budget(model))}"
    return box(title, host_lines(model, width - 4, context), width, 8, context.glyphs)


def _calls(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    lines = [*request_lines(model, width - 4, context), *service_lines(model, width - 4)]
    return box(f"calls; rates {WINDOW}", lines, width, 8, context.glyphs)


def _hot(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    inside = width - 4
    lines = [*hot_lines(model, inside, context), *gpu_lines(model, inside, context)]
    return box("hot buffers and GPU blocks", lines, width, height, context.glyphs)


def _chart_grid(
    model: NodeModel, width: int, height: int, across: int, context: ViewContext
) -> list[Line]:
    """Framed charts in rows of ``across``."""
    rows = min(len(_CHARTS) // across, height // (_LEAST_CHART + 1), 3)
    if rows < 1:
        return []
    widths = split_width(width, (1,) * across)
    names = iter(_CHARTS)
    lines: list[Line] = []
    for tall in split_width(height, (1,) * rows):
        lines += beside([chart_box(model, next(names), wide, tall, context) for wide in widths])
    return lines


def _journal_box(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    inside = width - 4
    rows = [entry_line(model, one, context) for one in moves(model, height - 2)]
    spare = height - 2 - len(rows)
    lines: list[Line] = []
    for row in rows:
        # Where rows are free, the newest entries show their whole sentence.
        whole = wrap_line(row, inside, SENTENCE_AT)
        if len(whole) - 1 <= spare:
            spare -= len(whole) - 1
            lines += whole
        else:
            lines.append(fit(row, inside, more=context.glyphs.more))
    if not lines:
        lines = [line(("nothing moved yet", "dim"))]
    return box("moves and events", lines, width, height, context.glyphs)


def _budget(model: NodeModel) -> float | None:
    return number(model.derived, "pools.budget_bytes")


def _rule(title: str, width: int, context: ViewContext) -> Line:
    across = context.glyphs.frame[4]
    head = f"{across} {title} "
    return line((head, "title"), (across * max(0, width - len(head)), "frame"))
