"""The application: feeds in, screens out. Draws at most four times a second, and every second
for the clock; between news nothing is asked of any node.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.notifications import SeverityLevel
from textual.screen import Screen

from hisparsed.tui.glyphs import ASCII, UNICODE
from hisparsed.tui.screens.dialogs import DetailDialog
from hisparsed.tui.screens.fleet_screen import FleetScreen
from hisparsed.tui.screens.node_screen import TABS, NodeScreen
from hisparsed.tui.screens.page import Page
from hisparsed.tui.screens.steady import SteadyPalette
from hisparsed.tui.session import Feed, NodeSession
from hisparsed.tui.themes import LOOKS
from hisparsed.tui.updates import Update
from hisparsed.tui.views.context import SPANS_S, ViewContext
from hisparsed.tui.views.help import help_lines

LEAST_BETWEEN_DRAWS_S = 0.25
_CLOCK_S = 1.0
_PAGES = (NodeScreen, FleetScreen)


class TopApp(App[None]):
    """``clock`` is Unix seconds."""

    CSS_PATH = "top.tcss"
    TITLE = "hisparsed top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("T", "next_theme", "Theme", show=False),
        Binding("0", "fleet", "Fleet", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        sessions: Sequence[NodeSession],
        *,
        readonly: bool = False,
        theme: str = "dark",
        ascii_only: bool = False,
        no_color: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True if no_color else None)
        for look in LOOKS.values():
            self.register_theme(look.theme)
        self.theme = "mono" if no_color else theme
        self.readonly = readonly
        self.glyphs = ASCII if ascii_only else UNICODE
        self.set_class(ascii_only, "ascii")
        self.sessions = sessions
        self.feeds: dict[str, Feed] = {}
        self._clock = clock
        self._span = 0
        self._screens: dict[str, NodeScreen] = {}
        self._fleet = FleetScreen(sessions) if len(sessions) > 1 else None
        self._draw_due = False

    def context(self, session: NodeSession | None = None) -> ViewContext:
        """A recorded journal has a time of its own."""
        now_s = self._clock()
        if session is not None and session.player is not None:
            now_s = session.model.node_time_s or now_s
        return ViewContext(self.glyphs, now_s, SPANS_S[self._span])

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Never as markup: brackets in what a node said are only brackets."""
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)

    def next_span(self) -> None:
        self._span = (self._span + 1) % len(SPANS_S)

    # --- feeds --------------------------------------------------------------------

    def on_mount(self) -> None:
        for session in self.sessions:
            feed = session.make_feed(self._teller(session))
            self.feeds[session.model.label] = feed
            self.run_worker(feed.run(), name=session.model.label, group="feeds")
        if self._fleet is not None:
            self.push_screen(self._fleet)
        else:
            self.open_node(self.sessions[0].model.label)
        self.set_interval(_CLOCK_S, self.draw)

    def _teller(self, session: NodeSession) -> Callable[[Update], None]:
        def tell(update: Update) -> None:
            session.model.apply(update, self._clock())
            if not self._draw_due:
                self._draw_due = True
                self.set_timer(LEAST_BETWEEN_DRAWS_S, self.draw)

        return tell

    def draw(self) -> None:
        """The page that is seen, also behind a dialog: what it says is of now."""
        self._draw_due = False
        pages = (one for one in reversed(self.screen_stack) if isinstance(one, _PAGES))
        page = next(pages, None)
        # One that is being built or taken down lacks some of its widgets.
        with contextlib.suppress(NoMatches):
            if page is not None:
                page.draw()

    # --- actions ------------------------------------------------------------------

    def open_node(self, label: str) -> None:
        """Show one node; its screen keeps page and filters while others are looked at."""
        if label not in self._screens:
            session = next(one for one in self.sessions if one.model.label == label)
            self._screens[label] = NodeScreen(session, self.feeds[label])
            self.install_screen(self._screens[label], f"node-{label}")
        self.push_screen(f"node-{label}")

    def action_fleet(self) -> None:
        if self._fleet is not None and isinstance(self.screen, NodeScreen):
            self.pop_screen()

    def action_next_theme(self) -> None:
        names = [name for name in LOOKS if name != "mono"]
        if self.theme in names:
            self.theme = names[(names.index(self.theme) + 1) % len(names)]
            self.draw()

    def action_help(self) -> None:
        self.push_screen(
            DetailDialog("Keys and signs", lambda width: help_lines(self.glyphs, width))
        )

    def action_command_palette(self) -> None:
        if not any(isinstance(one, CommandPalette) for one in self.screen_stack):
            self.push_screen(SteadyPalette(placeholder="what to do", id="--command-palette"))

    def _page_commands(self, page: Page) -> Iterable[SystemCommand]:
        """What the keys of the page do, by name."""

        def act(action: str) -> None:
            self.call_later(self.run_action, action, page)

        for binding in page.BINDINGS:
            if isinstance(binding, Binding) and binding.show:
                yield SystemCommand(
                    binding.description,
                    f"Key {binding.key}, on this page",
                    partial(act, binding.action),
                )

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette offers."""
        yield SystemCommand("Help", "Keys and signs", self.action_help)
        yield SystemCommand("Next theme", "Dark, light, colour-blind", self.action_next_theme)
        if self._fleet is not None:
            yield SystemCommand("Fleet", "All nodes, worst first", self.action_fleet)
        if isinstance(screen, NodeScreen):
            for tab in TABS:
                yield SystemCommand(
                    tab.title, "Show this page", lambda name=tab.name: screen.action_page(name)
                )
            yield from self._page_commands(screen.page)
            yield SystemCommand("Pause", "Tables stand still", screen.action_pause)
            yield SystemCommand("Span", "Time that charts show", screen.action_span)
        yield SystemCommand("Quit", "Leave", self.exit)
