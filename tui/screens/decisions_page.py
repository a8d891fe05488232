"""Page 2: the live journal, filtered by lever, code and words; Enter opens a decision whole."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from hisparsed.tui.errors import ViewError
from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.dialogs import ChoiceDialog, DetailDialog
from hisparsed.tui.screens.page import Page
from hisparsed.tui.styled import Line, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.decision_detail import decision_detail, event_detail
from hisparsed.tui.views.decisions import (
    Filter,
    codes,
    entries,
    entry_line,
    entry_titles,
    is_event,
)
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView
from hisparsed.tui.wire import Document, number, text

_EVERY_CODE = "all codes"
_VALUES_WIDTH = 100


class DecisionsPage(Page):
    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "lever", "Lever"),
        Binding("c", "code", "Code"),
        Binding("a", "every_tick", "Every tick"),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._filter = Filter()
        self._entries: list[Document] = []

    def compose(self) -> ComposeResult:
        yield LinesView(id="decisions-summary", classes="summary")
        yield TableView(id="decisions-table")

    @property
    def filter(self) -> Filter:
        return self._filter

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        self._entries = entries(model, self._filter)
        words = line(
            (f"{len(self._entries)}", "strong"), " entries: ", (self._filter.words, "accent")
        )
        self.query_one("#decisions-summary", LinesView).show_lines([words])

        wide = self.size.width >= _VALUES_WIDTH

        def row(index: int) -> Line:
            return entry_line(model, self._entries[index], context, values=wide)

        keys = [_key(one) for one in self._entries]
        title = line((entry_titles(values=wide), "title"))
        self.query_one(TableView).show_rows(title, keys, row, stale=model.stale)

    def entered(self) -> None:
        self.query_one(TableView).focus()

    def search(self, words: str) -> None:
        self._set(replace(self._filter, search=words))

    def _set(self, wanted: Filter) -> None:
        self._filter = wanted
        if wanted.every_tick and self.feed is not None:
            self.feed.refresh_decisions(wanted.lever, wanted.code)
        self.redraw()

    def action_lever(self) -> None:
        self._set(self._filter.next_lever())

    def action_every_tick(self) -> None:
        self._set(replace(self._filter, every_tick=not self._filter.every_tick))

    @work
    async def action_code(self) -> None:
        if self.shown is None:
            return
        known = [_EVERY_CODE, *codes(self.shown)]
        chosen = await self.app.push_screen_wait(ChoiceDialog("Only this code", known))
        if chosen is not None:
            self._set(replace(self._filter, code=None if chosen == _EVERY_CODE else chosen))

    # Exclusive: while a slow node is asked, another Enter asks anew instead of piling up.
    @work(exclusive=True)
    async def on_table_view_chosen(self, event: TableView.Chosen) -> None:
        entry = next((one for one in self._entries if _key(one) == event.key), None)
        if entry is None:
            return  # it left the table meanwhile
        if is_event(entry):
            await self.app.push_screen_wait(
                DetailDialog("Event", lambda width: event_detail(entry, width))
            )
            return
        whole, note = None, ""
        if self.feed is not None:
            try:
                whole = await self.feed.tick(entry)
            except ViewError as error:
                note = f"the snapshot is not to be had: {error}"
        await self.app.push_screen_wait(
            DetailDialog("Decision", lambda width: decision_detail(entry, whole, width), note)
        )


def _key(entry: Document) -> Hashable:
    return (number(entry, "at_unix_s"), number(entry, "sequence"), text(entry, "lever"))
