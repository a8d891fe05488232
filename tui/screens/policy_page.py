"""Page 4: the policy in force and where each value comes from; changes, each confirmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from hisparsed.tui import changes
from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.dialogs import ChoiceDialog, ValueDialog
from hisparsed.tui.screens.page import Page, Submit
from hisparsed.tui.styled import EMPTY, Line, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.levers import LEVERS, lever_lines
from hisparsed.tui.views.policy import (
    POLICY_TITLES,
    PolicyRow,
    policy_row_line,
    policy_rows,
    summary_lines,
)
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView

_DOCUMENT = "as the document says"


class _ValueTable(TableView):
    """Enter does what `e` does, so the footer leaves it out."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Set", show=False)]


class PolicyPage(Page):
    """``may_change`` says no where nothing may be changed, and tells the operator why."""

    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "set_value", "Set"),
        Binding("u", "unset", "Unset"),
        Binding("z", "freeze", "Freeze"),
        Binding("m", "mode", "Mode"),
        Binding("R", "reload", "Reload"),
    ]

    def __init__(self, name: str, may_change: Callable[[], bool], submit: Submit) -> None:
        super().__init__(name)
        self._may_change = may_change
        self._submit = submit
        self._search = ""
        self._rows: list[PolicyRow] = []

    def compose(self) -> ComposeResult:
        yield LinesView(id="policy-summary", classes="summary")
        yield _ValueTable(id="policy-table")

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        self._rows = policy_rows(model, self._search, now_s=context.now_s)
        view = self.query_one("#policy-summary", LinesView)
        width = self.size.width
        view.show_lines(
            [*summary_lines(model, width, context), *lever_lines(model, width, context), EMPTY],
            stale=model.stale,
        )

        def row(index: int) -> Line:
            return policy_row_line(self._rows[index])

        keys = [one.key for one in self._rows]
        self.query_one(TableView).show_rows(
            line((POLICY_TITLES, "title")), keys, row, stale=model.stale
        )

    def entered(self) -> None:
        self.query_one(TableView).focus()
        if self.feed is not None:
            self.feed.refresh_policy()

    def search(self, words: str) -> None:
        self._search = words
        self.redraw()

    def _under_cursor(self) -> PolicyRow | None:
        key = self.query_one(TableView).cursor_key
        return next((one for one in self._rows if one.key == key), None)

    def on_table_view_chosen(self) -> None:
        self.action_set_value()

    @work
    async def action_set_value(self) -> None:
        row, model = self._under_cursor(), self.shown
        if row is None or model is None or not self._may_change():
            return
        generation = model.generation
        given = await self.app.push_screen_wait(ValueDialog(row.key, row.value))
        if given is not None:
            value, seconds = given
            change = changes.set_value(row.key, row.value, value, seconds)
            await self._submit(change, generation)

    @work
    async def action_unset(self) -> None:
        row, model = self._under_cursor(), self.shown
        if row is None or model is None or not self._may_change():
            return
        if not row.overridden:
            self.notify(f"{row.key}: {row.origin}; there is nothing to unset")
            return
        await self._submit(changes.unset(row.key), model.generation)

    @work
    async def action_freeze(self) -> None:
        model = self.shown
        if model is None or not self._may_change():
            return
        generation, frozen = model.generation, changes.frozen_levers(model)
        choices = {f"{'thaw' if one in frozen else 'freeze'} {one}": one for one in LEVERS}
        chosen = await self.app.push_screen_wait(ChoiceDialog("Freeze or thaw", list(choices)))
        if chosen is None:
            return
        lever = choices[chosen]
        make = changes.thaw if lever in frozen else changes.freeze
        await self._submit(make(model, lever), generation)

    @work
    async def action_mode(self) -> None:
        model = self.shown
        if model is None or not self._may_change():
            return
        generation = model.generation
        lever = await self.app.push_screen_wait(ChoiceDialog("Mode of which lever", LEVERS))
        if lever is None:
            return
        modes = [*changes.MODES, _DOCUMENT]
        mode = await self.app.push_screen_wait(ChoiceDialog(f"Mode of {lever}", modes))
        if mode is not None:
            change = changes.set_mode(lever, None if mode == _DOCUMENT else mode)
            await self._submit(change, generation)

    @work
    async def action_reload(self) -> None:
        model = self.shown
        if model is not None and self._may_change():
            await self._submit(changes.reload(model), model.generation)
