"""The line at the bottom in which a search is typed; every key narrows the page at once."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


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
