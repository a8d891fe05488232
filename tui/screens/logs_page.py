"""Page 5: the node's health, and the latest log lines of daemon and engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from hisparsed.tui import changes
from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.dialogs import DetailDialog
from hisparsed.tui.screens.page import Page, Submit
from hisparsed.tui.styled import line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.health import doctor_lines, health_lines
from hisparsed.tui.views.logs import LogFilter, log_entries, log_lines
from hisparsed.tui.widgets.lines import LinesView


class LogsPage(Page):
    """``may_change`` says no where nothing may be asked of the node, and tells why."""

    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "level", "Level"),
        Binding("o", "source", "Source"),
        Binding("d", "doctor", "Doctor"),
        Binding("D", "look_again", "Look again"),
        Binding("end,G", "follow", "Follow", show=False),
    ]

    def __init__(self, name: str, may_change: Callable[[], bool], submit: Submit) -> None:
        super().__init__(name)
        self._may_change = may_change
        self._submit = submit
        self._filter = LogFilter()

    def compose(self) -> ComposeResult:
        yield LinesView(id="health", classes="summary")
        yield LinesView(id="log-lines")

    @property
    def filter(self) -> LogFilter:
        return self._filter

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        width = self.size.width
        lines = log_lines(model, self._filter, width)
        count = log_entries(model, self._filter)
        head = line((f"{count}", "strong"), " entries: ", (self._filter.words, "accent"))
        health = health_lines(model, width - 1, context)  # a scroll bar may take one
        self.query_one("#health", LinesView).show_lines([*health, head])
        view = self.query_one("#log-lines", LinesView)
        # At the end it follows; an operator who scrolled up stays where they are.
        following = view.scroll_offset.y >= view.max_scroll_y
        view.show_lines(lines or [line(("no entries", "dim"))], stale=model.stale)
        if following:
            self.call_after_refresh(view.scroll_end, animate=False)

    def entered(self) -> None:
        view = self.query_one("#log-lines", LinesView)
        view.focus()

    def search(self, words: str) -> None:
        self._set(replace(self._filter, search=words))

    def _set(self, wanted: LogFilter) -> None:
        self._filter = wanted
        self.redraw()

    def action_level(self) -> None:
        self._set(self._filter.next_level())

    def action_source(self) -> None:
        self._set(self._filter.next_source())

    def action_doctor(self) -> None:
        model = self.shown
        if model is not None:
            self.app.push_screen(
                DetailDialog("What the doctor found", lambda width: doctor_lines(model, width))
            )

    @work
    async def action_look_again(self) -> None:
        if self._may_change():
            await self._submit(changes.look_again(), None)

    def action_follow(self) -> None:
        self.query_one("#log-lines", LinesView).scroll_end(animate=False)
