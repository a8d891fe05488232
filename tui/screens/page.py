"""What all pages have in common: they draw a model, and may be searched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from textual.containers import Vertical

from hisparsed.tui.changes import Change
from hisparsed.tui.model import NodeModel
from hisparsed.tui.session import Feed
from hisparsed.tui.views.context import ViewContext

Submit = Callable[[Change, int | None], Awaitable[None]]
"""Asks the operator, then the node; with the policy generation that was looked at, if any."""


class Page(Vertical):
    """One page of a node. ``redraw`` draws again what was drawn last, after a key."""

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
        """Show only what has these words in it; only where ``searchable``."""

    def entered(self) -> None:
        """The page is shown from now on."""

    def left(self) -> None:
        """Another page is shown from now on."""
