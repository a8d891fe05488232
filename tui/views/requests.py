"""The table of requests: sorted by any column, never with text of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.pools import budget_gauge
from hisparsed.tui.wire import Document, items, number, text

_GAUGE_CELLS = 8


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    title: str
    width: int
    value: Callable[[Document], float | str | None]
    descending: bool = True
    """The order that an operator asks for first."""


def hit_ratio(row: Document) -> float | None:
    hits, loads = number(row, "hits") or 0.0, number(row, "loads") or 0.0
    return hits / (hits + loads) if hits + loads > 0 else None


COLUMNS = (
    Column("request", "request", 30, lambda row: text(row, "request_id"), descending=False),
    Column("state", "state", 10, lambda row: text(row, "state"), descending=False),
    Column("context", "context", 9, lambda row: number(row, "context_tokens")),
    Column("resident", "on GPU", 15, lambda row: number(row, "resident_share")),
    Column("residency", "resid.", 7, lambda row: text(row, "residency"), descending=False),
    Column("hot", "hot rows", 15, lambda row: number(row, "hot_rows")),
    Column("hits", "hits", 7, hit_ratio, descending=False),
    Column("loads", "loads", 8, lambda row: number(row, "loads")),
    Column("age", "age", 8, lambda row: number(row, "age_s")),
)


@dataclass(frozen=True, slots=True)
class Order:
    column: str = "age"
    descending: bool = True
    search: str = ""

    def by(self, name: str) -> Order:
        """Sorted by this column; the other way round when it is already."""
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


def title_line(order: Order, context: ViewContext) -> Line:
    parts = []
    for index, column in enumerate(COLUMNS):
        mark = ""
        if column.name == order.column:
            mark = context.glyphs.sort_down if order.descending else context.glyphs.sort_up
        label = column.title + mark
        parts.append((_aligned(label, column.width, left=index < 2), "title"))
    return line(*parts)


def column_at(x: int) -> str | None:
    """The column at a screen column of the title line."""
    end = 0
    for column in COLUMNS:
        end += column.width
        if x < end:
            return column.name
    return None


def request_row(row: Document, context: ViewContext) -> Line:
    share = number(row, "resident_share")
    hot, capacity = number(row, "hot_rows"), number(row, "hot_capacity_rows")
    state = text(row, "state") or ""
    hits = hit_ratio(row)
    request_id = text(row, "request_id") or ""
    bar = budget_gauge(share, _GAUGE_CELLS, context) if share is not None else Line()
    bar = Line(tuple((part, "chart" if role != "free" else role) for part, role in bar.spans))
    return (
        line(
            (_cut(request_id, COLUMNS[0].width - 1, context) + " ", "strong"),
            (f"{state:<10}", {"preempted": "bad", "waiting": "warn"}.get(state, "")),
            f"{fmt.whole(number(row, 'context_tokens')):>9}",
            f"{fmt.percent(share):>6} ",
        )
        + (bar if share is not None else line(" " * _GAUGE_CELLS))
        + line(
            f"{text(row, 'residency') or fmt.UNKNOWN:>7}",
            f"{fmt.whole(hot) + '/' + fmt.whole(capacity) if capacity else fmt.UNKNOWN:>15}",
            (f"{fmt.percent(hits, 1):>7}", "warn" if hits is not None and hits < 0.8 else ""),
            f"{fmt.short(number(row, 'loads')):>8}",
            f"{fmt.duration(number(row, 'age_s')):>8}",
        )
    )


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
        (f"; made in {fmt.duration((number(table, 'took_us') or 0) / 1e6)}", "dim"),
    )  # fmt: skip


def _words(row: Document) -> str:
    return " ".join(str(row.get(name) or "") for name in ("request_id", "state", "residency"))


def _cut(value: str, width: int, context: ViewContext) -> str:
    if len(value) <= width:
        return value.ljust(width)
    return value[: width - len(context.glyphs.more)] + context.glyphs.more


def _aligned(label: str, width: int, *, left: bool) -> str:
    return label[: width - 1].ljust(width) if left else label[: width - 1].rjust(width)
