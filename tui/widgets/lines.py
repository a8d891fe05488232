"""A widget that draws lines of styled text, and scrolls them if there are more than fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hisparsed.tui.styled import Line, ascii_line, within
from hisparsed.tui.themes import DARK, LOOKS, Look


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
