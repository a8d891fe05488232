"""A screen that takes the terminal's latest size only.

Textual sends a screen every size that the terminal had, and the layout of one size sends the
screen that size again. Two sizes in its queue at once (a window that is dragged, a busy machine)
would then be laid out in turn for ever.
"""

from __future__ import annotations

from textual import events
from textual.screen import ModalScreen, Screen, ScreenResultType


class SteadyScreen(Screen[ScreenResultType]):
    """``resized`` is called after each size that counts."""

    def on_resize(self, event: events.Resize) -> None:
        if event.size != self.app.size:
            event.prevent_default()
            return
        self.resized(event)

    def resized(self, event: events.Resize) -> None:
        """Fit what is shown to the size."""


class SteadyModal(ModalScreen[ScreenResultType], SteadyScreen[ScreenResultType]):
    """The same for a dialog."""
