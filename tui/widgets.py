"""Widgets that draw lines and tables, the search line, and screens that keep the terminal's size.

They know nothing of nodes. ``LinesView`` draws and scrolls styled lines. ``TableView`` has a cursor
and draws only what is seen; its rows have keys, so that the cursor stays on its row.

Textual sends a screen every size that the terminal had, and the layout of one size sends the
screen that size again. Two sizes in its queue at once (a window that is dragged, a busy machine)
would then be laid out in turn forever; ``SteadyScreen`` takes the latest size only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from hisparsed.tui.styled import EMPTY, Line, ascii_line, within
from hisparsed.tui.themes import DARK, LOOKS, Look


class SteadyScreen(Screen[ScreenResultType]):
    """``resized`` is called after each size that counts."""

    def on_resize(self, event: events.Resize) -> None:
        if _is_old(self, event):
            event.prevent_default()
            return
        self.resized(event)

    def resized(self, event: events.Resize) -> None:
        """Fit what is shown to the size."""


class SteadyModal(ModalScreen[ScreenResultType], SteadyScreen[ScreenResultType]):
    """The same for a dialog."""


class SteadyPalette(CommandPalette):
    """The same for Textual's command palette, whose styles only its own heirs have."""

    def on_resize(self, event: events.Resize) -> None:
        if _is_old(self, event):
            event.prevent_default()


def _is_old(screen: Screen[Any], event: events.Resize) -> bool:
    return event.size != screen.app.size


def strip_of(
    text: Line, look: Look, base: Style, *, stale: bool = False, ascii_only: bool = False
) -> Strip:
    """Stale lines keep their words and lose their colours."""
    if ascii_only:
        text = ascii_line(text)
    if stale:
        gray = base + look.style("stale")
        return Strip([Segment(part, gray) for part, _ in text.spans])
    return Strip([Segment(part, base + look.style(role)) for part, role in text.spans])


class LinesView(ScrollView):
    """Set ``show_lines``; it redraws only when they differ."""

    DEFAULT_CSS = """
    LinesView { overflow-x: hidden; scrollbar-size: 1 1; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []
        self._stale = False

    @property
    def lines(self) -> Sequence[Line]:
        return self._lines

    @property
    def look(self) -> Look:
        return LOOKS.get(self.app.theme, DARK)

    def show_lines(self, lines: Sequence[Line], *, stale: bool = False) -> None:
        if stale == self._stale and len(lines) == len(self._lines):
            changed = [
                index
                for index, (old, new) in enumerate(zip(self._lines, lines, strict=True))
                if old != new
            ]
            self._lines = list(lines)
            for index in changed:
                self.refresh_line(index)
            return
        self._lines, self._stale = list(lines), stale
        self.virtual_size = Size(self.size.width, len(self._lines))
        self.refresh()

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._lines))

    def render_line(self, y: int) -> Strip:
        width, index = self.size.width, y + round(self.scroll_offset.y)
        base = self.rich_style
        if index >= len(self._lines):
            return Strip.blank(width, base)
        strip = strip_of(
            within(self._lines[index], self.scrollable_content_region.width),
            self.look,
            base,
            stale=self._stale,
            ascii_only=self.app.has_class("ascii"),
        )
        return strip.adjust_cell_length(width, base)

    def refresh_line(self, index: int) -> None:
        """Redraw one line of the text."""
        y = index - round(self.scroll_offset.y)
        if 0 <= y < self.size.height:
            self.refresh_lines(y, 1)


RenderRow = Callable[[int], Line]


class TableView(ScrollView, can_focus=True):
    """``show_rows`` sets what is drawn; the title line stays on top."""

    DEFAULT_CSS = """
    TableView { overflow-x: hidden; scrollbar-size: 1 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(0)", "First", show=False),
        Binding("end,G", "edge(-1)", "Last", show=False),
        Binding("enter", "choose", "Open", key_display="enter"),
    ]

    class Chosen(Message):
        """Enter, or a click on the row under the cursor."""

        def __init__(self, table: TableView, key: Hashable) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> TableView:
            return self.table

    class Moved(Message):
        """The cursor went to another row."""

        def __init__(self, table: TableView) -> None:
            super().__init__()
            self.table = table

        @property
        def control(self) -> TableView:
            return self.table

    class TitleClicked(Message):
        """A click on the title line at a column of the screen."""

        def __init__(self, table: TableView, x: int) -> None:
            super().__init__()
            self.table = table
            self.x = x

        @property
        def control(self) -> TableView:
            return self.table

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._title = EMPTY
        self._keys: Sequence[Hashable] = ()
        self._row: RenderRow = lambda _: EMPTY
        self._cursor = 0
        self._stale = False

    @property
    def look(self) -> Look:
        return LOOKS.get(self.app.theme, DARK)

    @property
    def cursor_key(self) -> Hashable | None:
        return self._keys[self._cursor] if self._keys else None

    @property
    def keys(self) -> Sequence[Hashable]:
        return self._keys

    def show_rows(
        self, title: Line, keys: Sequence[Hashable], row: RenderRow, *, stale: bool = False
    ) -> None:
        """``row`` makes the line of an index, when it is seen. At the top the cursor follows new
        rows; elsewhere it keeps its row."""
        held = self.cursor_key
        self._title, self._keys, self._row, self._stale = title, keys, row, stale
        if held is not None and self._cursor > 0 and held in keys:
            moved = list(keys).index(held) - self._cursor
            self._cursor += moved
            if moved:
                self.scroll_to(y=max(0, self.scroll_offset.y + moved), animate=False)
        self._cursor = max(0, min(self._cursor, len(keys) - 1))
        self._resize()
        self.refresh()

    def _resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)

    def on_resize(self) -> None:
        self._resize()

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        seen = self.scrollable_content_region.width
        if y == 0:
            title = within(self._title, seen)
            return self._strip(title, base, stale=False).adjust_cell_length(width, base)
        index = y - 1 + round(self.scroll_offset.y)
        if index >= len(self._keys):
            return Strip.blank(width, base)
        here = index == self._cursor
        if here:
            base += self.look.style("cursor")
        strip = self._strip(within(self._row(index), seen), base, stale=self._stale)
        return strip.adjust_cell_length(width, base)

    def _strip(self, text: Line, base: Style, *, stale: bool) -> Strip:
        ascii_only = self.app.has_class("ascii")
        return strip_of(text, self.look, base, stale=stale, ascii_only=ascii_only)

    def _go(self, index: int) -> None:
        self._cursor = max(0, min(index, len(self._keys) - 1))
        top, shown = round(self.scroll_offset.y), max(1, self.size.height - 1)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + shown:
            self.scroll_to(y=self._cursor - shown + 1, animate=False)
        self.refresh()
        self.post_message(self.Moved(self))

    def action_move(self, by: int) -> None:
        self._go(self._cursor + by)

    def action_page(self, by: int) -> None:
        self._go(self._cursor + by * max(1, self.size.height - 2))

    def action_edge(self, index: int) -> None:
        self._go(index if index >= 0 else len(self._keys) - 1)

    def action_choose(self) -> None:
        if self._keys:
            self.post_message(self.Chosen(self, self._keys[self._cursor]))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            self.post_message(self.TitleClicked(self, event.x))
            return
        index = event.y - 1 + round(self.scroll_offset.y)
        if index >= len(self._keys):
            return
        if index == self._cursor:
            self.action_choose()
        else:
            self._go(index)


class SearchLine(Input):
    """Enter keeps the search, Escape ends it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "End search", show=False)]

    class Left(Message):
        """The line is done; ``kept`` is what to search for."""

        def __init__(self, kept: str) -> None:
            super().__init__()
            self.kept = kept

    def action_leave(self) -> None:
        self.value = ""
        self.post_message(self.Left(""))

    async def action_submit(self) -> None:
        self.post_message(self.Left(self.value))
