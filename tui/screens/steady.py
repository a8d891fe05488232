"""A screen that takes the terminal's latest size only.

Textual sends a screen every size that the terminal had, and the layout of one size sends the
screen that size again. Two sizes in its queue at once (a window that is dragged, a busy machine)
would then be laid out in turn for ever.
"""

from __future__ import annotations

from typing import Any

from textual import events
from textual.command import CommandPalette
from textual.screen import ModalScreen, Screen, ScreenResultType


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
