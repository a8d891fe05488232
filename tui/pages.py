"""The pages of one node: overview, decisions, requests, policy, and logs with health.

``Page`` is their common base: they draw a model, and may be searched. A page turns the lines of its
view into widgets and takes its keys; changes go through ``submit``, which asks the operator first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from hisparsed.tui import changes
from hisparsed.tui.changes import ChangeRequest
from hisparsed.tui.dialogs import DIALOG_TEXT, ChoiceDialog, DetailDialog, ValueDialog
from hisparsed.tui.feed import Feed
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import ViewError
from hisparsed.tui.styled import EMPTY, Line, line
from hisparsed.tui.views.decisions import (
    Filter,
    codes,
    decision_detail,
    entries,
    entry_line,
    entry_titles,
    entry_words,
    event_detail,
    first_of,
    is_event,
)
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.health import doctor_lines, health_lines
from hisparsed.tui.views.logs import LogFilter, log_entries, log_lines
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.views.policy import (
    LEVERS,
    PolicyRow,
    key_lines,
    lever_lines,
    policy_row_line,
    policy_rows,
    policy_titles,
    summary_lines,
)
from hisparsed.tui.views.requests import (
    Order,
    column_at,
    request_detail,
    request_row,
    sorted_rows,
    summary_line,
    title_line,
)
from hisparsed.tui.widgets import LinesView, TableView
from hisparsed.tui.wire import Document, number, text

Submit = Callable[[ChangeRequest, int | None], Awaitable[None]]
"""Asks the operator, then the node; with the policy generation that was looked at, if any."""


class Page(Vertical):
    """One page of a node. ``redraw`` repeats the last drawing, after a key."""

    searchable = False

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.feed: Feed | None = None
        self.shown: NodeModel | None = None
        self.shown_in = ViewContext()

    def draw(self, model: NodeModel, context: ViewContext) -> None:
        self.shown, self.shown_in = model, context
        self.show_model(model, context)

    def redraw(self) -> None:
        if self.shown is not None:
            self.show_model(self.shown, self.shown_in)

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        """Put the model on the screen."""
        raise NotImplementedError

    def search(self, words: str) -> None:
        """Show only entries with these words; only if ``searchable``."""

    def entered(self) -> None:
        """The page is shown from now on."""

    def left(self) -> None:
        """Another page is shown from now on."""


class _QuietTable(TableView):
    """The footer is full of other keys and does not show Enter."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Open", show=False)]


class OverviewPage(Page):
    def compose(self) -> ComposeResult:
        yield LinesView(id="overview-lines")

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        view = self.query_one("#overview-lines", LinesView)
        width, height = view.size
        if width and height:
            view.show_lines(overview_lines(model, width, height, context), stale=model.outdated)

    def entered(self) -> None:
        self.query_one("#overview-lines").focus()


_EVERY_CODE = "all codes"
_VALUES_WIDTH = 100


class DecisionsPage(Page):
    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "lever", "Lever"),
        Binding("c", "code", "Code"),
        Binding("a", "every_tick", "Every tick"),
        Binding("f", "fold", "Fold"),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._filter = Filter()
        self._entries: list[Document] = []

    def compose(self) -> ComposeResult:
        yield LinesView(id="decisions-summary", classes="summary")
        yield _QuietTable(id="decisions-table")
        yield LinesView(id="decision-words", classes="words")

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
        self._show_words()

    def on_table_view_moved(self) -> None:
        self._show_words()

    def _show_words(self) -> None:
        """The whole row under the cursor, which a narrow table cuts."""
        key = self.query_one(TableView).cursor_key
        entry = next((one for one in self._entries if _key(one) == key), None)
        width = max(20, self.size.width - 2)
        view = self.query_one("#decision-words", LinesView)
        view.show_lines([] if entry is None else entry_words(entry, width))

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

    def action_fold(self) -> None:
        self._set(replace(self._filter, fold=not self._filter.fold))

    @work
    async def action_code(self) -> None:
        if self.shown is None:
            return
        known = [_EVERY_CODE, *codes(self.shown)]
        chosen = await self.app.push_screen_wait(ChoiceDialog("Only this code", known))
        if chosen is not None:
            self._set(replace(self._filter, code=None if chosen == _EVERY_CODE else chosen))

    # Exclusive: while a slow node is asked, another Enter replaces the request.
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
                note = f"the snapshot is not available: {error}"
        await self.app.push_screen_wait(
            DetailDialog("Decision", lambda width: decision_detail(entry, whole, width), note)
        )


def _key(entry: Document) -> Hashable:
    entry = first_of(entry)
    return (number(entry, "at_unix_s"), number(entry, "sequence"), text(entry, "lever"))


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


_DOCUMENT = "as the document says"


class PolicyPage(Page):
    """``may_change`` is false if nothing may be changed, and shows the operator why."""

    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "set_value", "Set"),
        Binding("u", "unset", "Unset"),
        Binding("z", "freeze", "Freeze"),
        Binding("m", "mode", "Mode"),
        Binding("R", "reload", "Reload", show=False),
    ]

    def __init__(self, name: str, may_change: Callable[[], bool], submit: Submit) -> None:
        super().__init__(name)
        self._may_change = may_change
        self._submit = submit
        self._search = ""
        self._rows: list[PolicyRow] = []

    def compose(self) -> ComposeResult:
        yield LinesView(id="policy-summary", classes="summary")
        yield _QuietTable(id="policy-table")
        yield LinesView(id="policy-key", classes="words")

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        self._rows = policy_rows(model, self._search, now_s=context.now_s)
        view = self.query_one("#policy-summary", LinesView)
        width = self.size.width
        view.show_lines(
            [*summary_lines(model, width, context), *lever_lines(model, width, context), EMPTY],
            stale=model.stale,
        )

        def row(index: int) -> Line:
            return policy_row_line(model, self._rows[index], width)

        keys = [one.key for one in self._rows]
        self.query_one(TableView).show_rows(
            line((policy_titles(width), "title")), keys, row, stale=model.stale
        )
        self._explain_key()

    def on_table_view_moved(self) -> None:
        self._explain_key()

    def _explain_key(self) -> None:
        """The meaning of the key under the cursor."""
        row, model = self._under_cursor(), self.shown
        view = self.query_one("#policy-key", LinesView)
        view.show_lines([] if row is None or model is None else self._key_lines(row, model))

    def _key_lines(self, row: PolicyRow, model: NodeModel) -> list[Line]:
        return key_lines(model, row.key, max(20, self.size.width - 2))

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
        about = key_lines(model, row.key, DIALOG_TEXT)
        given = await self.app.push_screen_wait(ValueDialog(row.key, row.value, about))
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


class LogsPage(Page):
    """``may_change`` is false if the node cannot be asked, and shows why."""

    searchable = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "level", "Level"),
        Binding("o", "source", "Source"),
        Binding("f", "fold", "Fold"),
        Binding("d", "doctor", "Doctor"),
        Binding("D", "look_again", "Look again", show=False),
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
        # At the end the view follows new lines; if the operator scrolled up, it stays.
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

    def action_fold(self) -> None:
        self._set(replace(self._filter, fold=not self._filter.fold))

    def action_doctor(self) -> None:
        model = self.shown
        if model is not None:
            self.app.push_screen(
                DetailDialog("Findings of the doctor", lambda width: doctor_lines(model, width))
            )

    @work
    async def action_look_again(self) -> None:
        if self._may_change():
            await self._submit(changes.look_again(), None)

    def action_follow(self) -> None:
        self.query_one("#log-lines", LinesView).scroll_end(animate=False)
