"""The table of requests: sorted by any column, never with text of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, hanging, line
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.panels import budget_gauge
from hisparsed.tui.wire import Document, items, number, text

_GAUGE_CELLS = 8


@dataclass(frozen=True, slots=True)
class Column:
    """``narrow`` is its width in cells where the screen has not room for ``width``."""

    name: str
    title: str
    width: int
    narrow: int
    value: Callable[[Document], float | str | None]
    descending: bool = True
    """The order that an operator asks for first."""


def hit_ratio(row: Document) -> float | None:
    hits, loads = number(row, "hits") or 0.0, number(row, "loads") or 0.0
    return hits / (hits + loads) if hits + loads > 0 else None


COLUMNS = (
    Column("request", "request", 30, 15, lambda row: text(row, "request_id"), descending=False),
    Column("state", "state", 10, 10, lambda row: text(row, "state"), descending=False),
    Column("context", "context", 9, 9, lambda row: number(row, "context_tokens")),
    Column("resident", "on GPU", 15, 7, lambda row: number(row, "resident_share")),
    Column("residency", "residency", 11, 7, lambda row: text(row, "residency"), descending=False),
    Column("hot", "hot rows", 15, 11, lambda row: number(row, "hot_rows")),
    Column("hits", "hits", 7, 7, hit_ratio, descending=False),
    Column("loads", "loads", 8, 6, lambda row: number(row, "loads")),
    Column("age", "age", 8, 7, lambda row: number(row, "age_s")),
)
_LEAST_WIDE = sum(column.width for column in COLUMNS)
_LONGEST_ID = 64


def column_widths(width: int) -> tuple[int, ...]:
    """Cells of each column on a screen of ``width``. The request takes what the others leave, up
    to the longest id; what is left then goes to the other columns in equal parts."""
    wide = width > _LEAST_WIDE
    others = [column.width if wide else column.narrow for column in COLUMNS[1:]]
    least = COLUMNS[0].width if wide else COLUMNS[0].narrow
    # One cell is the scroll bar's.
    room = width - 1 - sum(others)
    first = max(least, min(_LONGEST_ID, room))
    more = max(0, room - first) // len(others)
    return (first, *(cells + more for cells in others))


@dataclass(frozen=True, slots=True)
class Order:
    column: str = "age"
    descending: bool = True
    search: str = ""

    def by(self, name: str) -> Order:
        """Sorted by this column; reverse the order when it is already."""
        if name == self.column:
            return replace(self, descending=not self.descending)
        column = next(one for one in COLUMNS if one.name == name)
        return replace(self, column=name, descending=column.descending)

    def next(self) -> Order:
        names = [one.name for one in COLUMNS]
        return self.by(names[(names.index(self.column) + 1) % len(names)])


def sorted_rows(model: NodeModel, order: Order) -> list[Document]:
    """Unknown values come last whichever the order; equal ones by their id."""
    column = next(one for one in COLUMNS if one.name == order.column)
    rows = [
        row
        for row in items(model.requests, "rows")
        if not order.search or order.search.lower() in _words(row)
    ]
    rows.sort(key=lambda row: text(row, "request_id") or "")
    known = [row for row in rows if column.value(row) is not None]
    unknown = [row for row in rows if column.value(row) is None]
    known.sort(key=column.value, reverse=order.descending)  # type: ignore[arg-type]
    return known + unknown


def title_line(order: Order, width: int, context: ViewContext) -> Line:
    parts = []
    for index, (column, cells) in enumerate(zip(COLUMNS, column_widths(width), strict=True)):
        mark = ""
        if column.name == order.column:
            mark = context.glyphs.sort_down if order.descending else context.glyphs.sort_up
        label = column.title + mark
        parts.append((_aligned(label, cells, left=index < 2), "title"))
    return line(*parts)


def column_at(x: int, width: int) -> str | None:
    """The column at a screen column of the title line."""
    end = 0
    for column, cells in zip(COLUMNS, column_widths(width), strict=True):
        end += cells
        if x < end:
            return column.name
    return None


def request_row(row: Document, width: int, context: ViewContext) -> Line:
    first, state_cells, context_cells, gpu, residency, hot_cells, *rest = column_widths(width)
    share, hits = number(row, "resident_share"), hit_ratio(row)
    hot, capacity = number(row, "hot_rows"), number(row, "hot_capacity_rows")
    rows = f"{fmt.whole(hot)}/{fmt.whole(capacity)}" if capacity else fmt.UNKNOWN
    state = text(row, "state") or ""
    figures = (
        (fmt.percent(hits, 1), "warn" if hits is not None and hits < 0.8 else ""),
        (fmt.short(number(row, "loads")), ""),
        (fmt.duration(number(row, "age_s")), ""),
    )
    return (
        line(
            (_cut(text(row, "request_id") or "", first - 1, context) + " ", "strong"),
            (f"{state:<{state_cells}}", {"preempted": "bad", "waiting": "warn"}.get(state, "")),
            f"{fmt.whole(number(row, 'context_tokens')):>{context_cells}}",
        )
        + _on_gpu(share, gpu, context)
        + line(
            f"{text(row, 'residency') or fmt.UNKNOWN:>{residency}}",
            f"{rows:>{hot_cells}}",
            *(
                (f"{words:>{cells}}", role)
                for (words, role), cells in zip(figures, rest, strict=True)
            ),
        )
    )


def _on_gpu(share: float | None, cells: int, context: ViewContext) -> Line:
    """A percentage, and a bar where there is room for one."""
    room = cells - 7
    if room < _GAUGE_CELLS:
        return line(f"{fmt.percent(share):>{cells}}")
    words = line(f"{fmt.percent(share):>6} ")
    if share is None:
        return words + line(" " * room)
    bar = budget_gauge(share, room, context)
    return words + Line(
        tuple((part, "chart" if role != "free" else role) for part, role in bar.spans)
    )


_RESIDENCIES = {
    "full": "all its pages are on the GPU",
    "mixed": "some of its pages are on the GPU, the others in host memory only",
    "none": "its pages are in host memory, but for the last ones",
}
_IN_WORDS = frozenset(
    {
        "request_id", "state", "age_s", "preemptions", "context_tokens", "computed_tokens",
        "residency", "resident_share", "hot_rows", "hot_capacity_rows", "references", "resident",
        "hits", "loads",
    }
)  # fmt: skip


def request_detail(row: Document, width: int) -> list[Line]:
    """Everything that the node reports of a request, in words; never its prompt."""
    lines = []
    for name, words in _in_words(row):
        lines += hanging(line((f"{name:<12}", "dim")), words, width)
    # Fields that a later version of the node adds are shown as they are.
    for key, value in row.items():
        if key not in _IN_WORDS:
            lines += hanging(line((f"{key:<20}", "dim")), fmt.setting(value), width)
    return lines


def _in_words(row: Document) -> Iterator[tuple[str, str]]:
    yield "request", text(row, "request_id") or fmt.UNKNOWN
    preempted = number(row, "preemptions")
    times = "" if preempted is None else f", preempted {fmt.counted(preempted, 'time')}"
    age = fmt.duration(number(row, "age_s"))
    yield "state", f"{text(row, 'state') or fmt.UNKNOWN}; arrived {age} ago{times}"
    context, computed = number(row, "context_tokens"), number(row, "computed_tokens")
    yield "context", f"{fmt.whole(context)} tokens, {fmt.whole(computed)} of them computed"
    residency = text(row, "residency")
    if residency is not None:
        means = _RESIDENCIES.get(residency, "")
        share = fmt.percent(number(row, "resident_share"))
        yield "residency", f"{residency}: {means} ({share} of its pages on the GPU)"
    held, capacity = number(row, "hot_rows"), number(row, "hot_capacity_rows")
    if capacity:
        used = fmt.percent((held or 0) / capacity)
        yield "hot buffer", f"{fmt.whole(held)} of {fmt.whole(capacity)} rows filled ({used})"
    read = number(row, "references")
    if read:
        parts = ", ".join(
            f"{fmt.whole(number(row, key))} {words} "
            f"({fmt.percent((number(row, key) or 0) / read, 1)})"
            for key, words in (
                ("resident", "on the GPU already"),
                ("hits", "in its hot buffer"),
                ("loads", "loaded from host memory"),
            )
        )
        yield "rows read", f"{fmt.whole(read)} in all: {parts}"


def summary_line(model: NodeModel, order: Order, shown: int) -> Line:
    table = model.requests
    if table is None:
        return line((model.requests_why or "asking the engine ...", "dim"))
    omitted = number(table, "omitted")
    search = f', matching "{order.search}"' if order.search else ""
    return line(
        (fmt.whole(number(table, "running")), "strong"), (" running, ", "dim"),
        (fmt.whole(number(table, "waiting")), "strong"), (" waiting", "dim"),
        (f"; {shown} shown{search}", "dim"),
        (f", {fmt.whole(omitted)} more are not listed" if omitted else "", "warn"),
        (f"; listed in {fmt.duration((number(table, 'took_us') or 0) / 1e6)}", "dim"),
    )  # fmt: skip


def _words(row: Document) -> str:
    return " ".join(str(row.get(name) or "") for name in ("request_id", "state", "residency"))


def _cut(value: str, width: int, context: ViewContext) -> str:
    if len(value) <= width:
        return value.ljust(width)
    return value[: width - len(context.glyphs.more)] + context.glyphs.more


def _aligned(label: str, width: int, *, left: bool) -> str:
    if len(label) >= width:
        label = f"{label[: width - 2]}."
    return label.ljust(width) if left else label.rjust(width)
