"""The first page: everything an operator looks at first, laid out for the room there is."""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, beside, block, fit, line
from hisparsed.tui.views.decisions import entry_line, moves
from hisparsed.tui.views.drawing import ViewContext, box, chart, spark, split_width
from hisparsed.tui.views.health import gpus_line
from hisparsed.tui.views.panels import (
    gpu_lines,
    host_compact,
    host_lines,
    hot_lines,
    request_lines,
    service_line,
    service_lines,
)
from hisparsed.tui.views.policy import lever_lines
from hisparsed.tui.wire import number

MEDIUM_WIDTH = 118
WIDE_WIDTH = 180
_COMPACT_CHARTS = ("tokens", "waiting", "miss", "h2d", "ttft", "prefix")
_CHARTS = (
    "tokens", "waiting", "ttft", "prefix", "miss", "h2d", "coverage", "offload", "running", "itl",
    "multiplier", "gpu_free",
)  # fmt: skip


def overview_lines(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    """Exactly ``height`` lines of ``width`` cells."""
    if width >= WIDE_WIDTH:
        lines = _wide(model, width, height, context)
    elif width >= MEDIUM_WIDTH:
        lines = _medium(model, width, height, context)
    else:
        lines = _compact(model, width, height, context)
    return block(lines, width, height)


def _compact(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    """No frames: a title ahead of each part, and as many charts as there is room for."""
    lines = [
        *host_compact(model, width, context),
        *gpu_lines(model, width, context),
        _rule("requests and hot buffers", width, context),
        *request_lines(model, width, context)[:2],
        *hot_lines(model, width, context),
        service_line(model, width),
    ]
    tail = [_rule("levers", width, context), *lever_lines(model, width, context)]
    room = max(0, height - len(lines) - len(tail))
    sparks = [spark(model.history, name, width, context) for name in _COMPACT_CHARTS[:room]]
    return [*lines, *sparks, *tail]


def _medium(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    glyphs = context.glyphs
    left, right = split_width(width, (1, 1))
    inside_left, inside_right = left - 4, right - 4
    top = beside(
        [
            box(
                f"host budget {fmt.size(_budget(model))}",
                host_lines(model, inside_left, context), left, 8, glyphs,
            ),
            box("requests and service", [
                *request_lines(model, inside_right, context),
                *service_lines(model, inside_right),
            ], right, 8, glyphs),
        ]
    )  # fmt: skip
    middle = beside(
        [
            box("hot buffers and GPU pool", [
                *hot_lines(model, inside_left, context), *gpu_lines(model, inside_left, context),
            ], left, 7, glyphs),
            box("levers", lever_lines(model, inside_right, context), right, 7, glyphs),
        ]
    )  # fmt: skip
    journal_rows = 6 if height >= 33 else 0
    cards = gpus_line(model, width, context)
    room = height - len(top) - len(middle) - len(cards) - journal_rows
    lines = [*top, *middle, *cards, *_chart_grid(model, width, room, 2, context)]
    if journal_rows:
        lines += _journal_box(model, width, journal_rows, context)
    return lines


def _wide(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    glyphs = context.glyphs
    one, two, three = split_width(width, (1, 1, 1))
    top = beside(
        [
            box(
                f"host budget {fmt.size(_budget(model))}",
                host_lines(model, one - 4, context), one, 8, glyphs,
            ),
            box("requests and service", [
                *request_lines(model, two - 4, context), *service_lines(model, two - 4),
            ], two, 8, glyphs),
            box("hot buffers and GPU pool", [
                *hot_lines(model, three - 4, context), *gpu_lines(model, three - 4, context),
            ], three, 8, glyphs),
        ]
    )  # fmt: skip
    top += gpus_line(model, width, context)
    rest = height - len(top)
    lower = min(16, max(0, rest // 3))
    lever_width, journal_width = split_width(width, (2, 3))
    lines = [*top, *_chart_grid(model, width, rest - lower, 3, context)]
    if lower:
        rows = max(1, (lower - 2) // 4)
        levers = lever_lines(model, lever_width - 4, context, rows=rows)
        lines += beside(
            [
                box("levers", levers, lever_width, lower, glyphs),
                _journal_box(model, journal_width, lower, context),
            ]
        )
    return lines


def _chart_grid(
    model: NodeModel, width: int, height: int, across: int, context: ViewContext
) -> list[Line]:
    """Framed charts in rows of ``across``; at least four rows of cells each."""
    if height < 6:
        return []
    rows = max(1, min(len(_CHARTS) // across, height // 7))
    heights = split_width(height, (1,) * rows)
    widths = split_width(width, (1,) * across)
    names = iter(_CHARTS)
    lines: list[Line] = []
    for row, tall in enumerate(heights):
        boxes: list[list[Line]] = []
        for wide in widths:
            name = next(names)
            inside = chart(model.history, name, wide - 4, tall - 2, context)
            title = f"last {fmt.duration(context.span_s)}" if row == 0 and not boxes else ""
            boxes.append(box(title, inside, wide, tall, context.glyphs))
        lines += beside(boxes)
    return lines


def _journal_box(model: NodeModel, width: int, height: int, context: ViewContext) -> list[Line]:
    inside = width - 4
    entries = moves(model, height - 2)
    lines = [
        fit(entry_line(model, one, context), inside, more=context.glyphs.more) for one in entries
    ]
    if not lines:
        lines = [line(("nothing moved yet", "dim"))]
    return box("what moved", lines, width, height, context.glyphs)


def _budget(model: NodeModel) -> float | None:
    return number(model.derived, "pools.budget_bytes")


def _rule(title: str, width: int, context: ViewContext) -> Line:
    across = context.glyphs.frame[4]
    head = f"{across} {title} "
    return line((head, "title"), (across * max(0, width - len(head)), "frame"))
