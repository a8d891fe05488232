"""The terminal view of both nodes while the demo's calls run, with the demo's progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.widgets import Footer, Static

from hisparsed.tui import app
from hisparsed.tui.app import FleetScreen, NodeScreen, TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.feed import NodeSession, live_session
from hisparsed.tui.options import make_options


class Left(StrEnum):
    """How the view was left."""

    BY_KEY = "by key"
    INTERRUPTED = "interrupted"


class DemoApp(TopApp):
    """Calls ``progress`` for its line in every draw. Starts on the first of ``sessions``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # A terminal in raw mode sends Ctrl-C as a key.
        Binding("ctrl+c", "interrupt", "End the demo", show=False, priority=True),
    ]
    CSS_PATH = str(Path(app.__file__).with_name("top.tcss"))
    CSS = "#demo { height: 1; background: $primary; color: $background; padding: 0 1; }"

    left = Left.BY_KEY

    def __init__(
        self,
        sessions: Sequence[NodeSession],
        progress: Callable[[], str],
        *,
        ascii_only: bool,
        no_color: bool,
    ) -> None:
        # A change by hand would distort the comparison.
        super().__init__(sessions, readonly=True, ascii_only=ascii_only, no_color=no_color)
        self._progress = progress

    def on_mount(self) -> None:
        """Textual calls that of ``TopApp`` as well, after this one."""
        self.call_later(self.open_node, self.sessions[0].model.label)

    def action_interrupt(self) -> None:
        self.left = Left.INTERRUPTED
        self.exit()

    def draw(self) -> None:
        super().draw()
        screen = self.screen_stack[-1] if self.screen_stack else None
        if not isinstance(screen, (NodeScreen, FleetScreen)):
            return
        words = f"{self._progress()}. q: leave, Ctrl-C: end"
        with contextlib.suppress(NoMatches):  # a screen that is being built or removed
            if screen.query("#demo"):
                screen.query_one("#demo", Static).update(words)
            else:
                screen.mount(
                    Static(words, id="demo", markup=False), before=screen.query_one(Footer)
                )


class DemoView:
    """Nodes by name, with their control sockets; it begins on the first, and Escape shows all."""

    def __init__(self, sockets: dict[str, os.PathLike[str]], progress: Callable[[], str]) -> None:
        self._sockets = sockets
        self._progress = progress
        self._app: DemoApp | None = None

    async def show(self) -> Left:
        """Runs until the operator leaves it, or ``close`` is called."""
        options = make_options(
            [f"{name}={os.fspath(path)}" for name, path in self._sockets.items()],
            socket=None,
            journal=None,
            readonly=True,
            theme="dark",
            ascii_only=False,
        )
        async with AsyncExitStack() as held:
            sessions = [
                live_session(await held.enter_async_context(NodeClient(address)))
                for address in options.addresses
            ]
            self._app = DemoApp(
                sessions,
                self._progress,
                ascii_only=options.ascii_only,
                no_color=options.no_color,
            )
            await self._app.run_async()
            return self._app.left

    def close(self) -> None:
        """Leave it, as its key would."""
        if self._app is not None:
            self._app.exit()
