"""Page 3: the table of requests, asked for only while somebody looks at it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.dialogs import DetailDialog
from hisparsed.tui.screens.page import Page
from hisparsed.tui.styled import Line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.requests import (
    Order,
    column_at,
    request_detail,
    request_row,
    sorted_rows,
    summary_line,
    title_line,
)
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView
from hisparsed.tui.wire import Document


class RequestsPage(Page):
    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._order = Order()
        self._rows: list[Document] = []

    def compose(self) -> ComposeResult:
        yield LinesView(id="requests-summary", classes="summary")
        yield TableView(id="requests-table")

    @property
    def order(self) -> Order:
        return self._order

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        self._rows = sorted_rows(model, self._order)
        summary = summary_line(model, self._order, len(self._rows))
        self.query_one("#requests-summary", LinesView).show_lines([summary])

        width = self.size.width

        def row(index: int) -> Line:
            return request_row(self._rows[index], width, context)

        keys = [str(one.get("request_id")) for one in self._rows]
        self.query_one(TableView).show_rows(
            title_line(self._order, width, context), keys, row, stale=model.outdated
        )

    def entered(self) -> None:
        self.query_one(TableView).focus()
        if self.feed is not None:
            self.feed.want_requests = True
            self.feed.refresh_requests()

    def left(self) -> None:
        if self.feed is not None:
            self.feed.want_requests = False

    def search(self, words: str) -> None:
        self._set(replace(self._order, search=words))

    def _set(self, order: Order) -> None:
        self._order = order
        self.redraw()

    def action_sort(self) -> None:
        self._set(self._order.next())

    def action_reverse(self) -> None:
        self._set(replace(self._order, descending=not self._order.descending))

    def on_table_view_title_clicked(self, event: TableView.TitleClicked) -> None:
        name = column_at(event.x, self.size.width)
        if name is not None:
            self._set(self._order.by(name))

    def on_table_view_chosen(self, event: TableView.Chosen) -> None:
        row = next((one for one in self._rows if str(one.get("request_id")) == event.key), None)
        if row is None:
            return
        self.app.push_screen(DetailDialog("Request", lambda width: request_detail(row, width)))
