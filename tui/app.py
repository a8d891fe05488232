"""The application: the screens of one node and of a fleet, fed by live nodes or a recorded journal.

Draws at most four times per second, and every second for the clock; between updates nothing is
asked of any node. ``run_app`` starts it on nodes or on a journal. The pages of a node are in
``pages``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, cast

from textual import events, work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer

from hisparsed.tui import changes
from hisparsed.tui import format as fmt
from hisparsed.tui.changes import ChangeRequest, answer_words, request_body
from hisparsed.tui.client import NodeClient
from hisparsed.tui.dialogs import ConfirmDialog, DetailDialog
from hisparsed.tui.feed import Feed, NodeSession, journal_session, live_session
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
from hisparsed.tui.options import TopOptions, ViewError
from hisparsed.tui.pages import (
    DecisionsPage,
    LogsPage,
    OverviewPage,
    Page,
    PolicyPage,
    RequestsPage,
)
from hisparsed.tui.styled import Line, ends, line
from hisparsed.tui.themes import LOOKS
from hisparsed.tui.updates import Update
from hisparsed.tui.views.drawing import ASCII, SPANS_S, UNICODE, ViewContext
from hisparsed.tui.views.fleet import fleet_line, fleet_summary, fleet_titles, worst_first
from hisparsed.tui.views.header import Banner, PageTab, header_lines, help_lines, tab_at, tab_line
from hisparsed.tui.widgets import LinesView, SearchLine, SteadyPalette, SteadyScreen, TableView

LEAST_BETWEEN_DRAWS_S = 0.25
_CLOCK_S = 1.0


TABS = (
    PageTab("1", "Overview", "overview"),
    PageTab("2", "Decisions", "decisions"),
    PageTab("3", "Requests", "requests"),
    PageTab("4", "Policy", "policy"),
    PageTab("5", "Logs & health", "logs"),
)


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
        """A recorded journal has its own time."""
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
        """Never as markup: brackets in a node's text are only brackets."""
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)

    def next_span(self) -> None:
        self._span = (self._span + 1) % len(SPANS_S)

    # --- feeds --------------------------------------------------------------------

    def on_mount(self) -> None:
        for session in self.sessions:
            feed = session.make_feed(self._updater(session))
            self.feeds[session.model.label] = feed
            self.run_worker(feed.run(), name=session.model.label, group="feeds")
        if self._fleet is not None:
            self.push_screen(self._fleet)
        else:
            self.open_node(self.sessions[0].model.label)
        self.set_interval(_CLOCK_S, self.draw)

    def _updater(self, session: NodeSession) -> Callable[[Update], None]:
        def apply(update: Update) -> None:
            session.model.apply(update, self._clock())
            if not self._draw_due:
                self._draw_due = True
                self.set_timer(LEAST_BETWEEN_DRAWS_S, self.draw)

        return apply

    def draw(self) -> None:
        """Draw the visible page, also behind a dialog, with the values of now."""
        self._draw_due = False
        pages = (one for one in reversed(self.screen_stack) if isinstance(one, _PAGES))
        page = next(pages, None)
        # A page that is being built or removed lacks some of its widgets.
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
            DetailDialog("Keys and symbols", lambda width: help_lines(self.glyphs, width))
        )

    def action_command_palette(self) -> None:
        if not any(isinstance(one, CommandPalette) for one in self.screen_stack):
            self.push_screen(SteadyPalette(placeholder="what to do", id="--command-palette"))

    def _page_commands(self, page: Page) -> Iterable[SystemCommand]:
        """The actions of the page's keys, by name."""

        def act(action: str) -> None:
            self.call_later(self.run_action, action, page)

        for binding in page.BINDINGS:
            if isinstance(binding, Binding) and binding.description:
                yield SystemCommand(
                    binding.description,
                    f"Key {binding.key}, on this page",
                    partial(act, binding.action),
                )

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The commands of the palette."""
        yield SystemCommand("Help", "Keys and symbols", self.action_help)
        yield SystemCommand("Next theme", "Dark, light, colour-blind", self.action_next_theme)
        if self._fleet is not None:
            yield SystemCommand("Fleet", "All nodes, worst first", self.action_fleet)
        if isinstance(screen, NodeScreen):
            for tab in TABS:
                yield SystemCommand(
                    tab.title, "Show this page", lambda name=tab.name: screen.action_page(name)
                )
            yield from self._page_commands(screen.page)
            yield SystemCommand(
                "Freeze all levers, or thaw them", "It asks first", screen.action_freeze_all
            )
            yield SystemCommand("Pause", "Tables and charts stop", screen.action_pause)
            yield SystemCommand("Span", "Time that charts show", screen.action_span)
        yield SystemCommand("Quit", "Leave", self.exit)


class NodeScreen(SteadyScreen[None]):
    """One node. The application calls ``draw`` after an update, and every second."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(tab.key, f"page('{tab.name}')", tab.title, show=False) for tab in TABS),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("Z", "freeze_all", "Freeze all"),
        Binding("p", "pause", "Pause", show=False),
        Binding("w", "span", "Span", show=False),
        Binding("space", "player('toggle')", "Play/pause", show=False),
        Binding("plus,equals_sign", "player('faster')", "Faster", show=False),
        Binding("minus", "player('slower')", "Slower", show=False),
        Binding("left", "player('back')", "Back", show=False),
        Binding("right", "player('on')", "Forward", show=False),
        Binding("shift+left", "player('far_back')", "Far back", show=False),
        Binding("shift+right", "player('far_on')", "Far forward", show=False),
        Binding("left_square_bracket", "player('previous_move')", "Previous move", show=False),
        Binding("right_square_bracket", "player('next_move')", "Next move", show=False),
        Binding("escape", "fleet", "Fleet", show=False),
    ]

    def __init__(self, session: NodeSession, feed: Feed) -> None:
        super().__init__()
        self.session = session
        self.feed = feed
        self._frozen: tuple[NodeModel, float] | None = None
        self._notice = ""

    @property
    def top(self) -> TopApp:
        return cast("TopApp", self.app)

    @property
    def paused(self) -> bool:
        return self._frozen is not None

    def compose(self) -> ComposeResult:
        yield LinesView(id="header")
        yield LinesView(id="tabs")
        with ContentSwitcher(initial="overview", id="pages"):
            yield OverviewPage("overview")
            yield DecisionsPage("decisions")
            yield RequestsPage("requests")
            yield PolicyPage("policy", self.may_change, self.submit)
            yield LogsPage("logs", self.may_change, self.submit)
        yield LinesView(id="too-small")
        yield SearchLine(placeholder="search; Enter keeps it, Escape ends it", id="search")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for page in self.query(Page):
            page.feed = self.feed
        for name in ("#header", "#tabs"):
            self.query_one(name).can_focus = False
        self.query_one("#search").display = False
        self.page.entered()

    @property
    def page(self) -> Page:
        """The page that is shown."""
        name = self.query_one("#pages", ContentSwitcher).current
        return self.query_one(f"#{name}", Page)

    # --- drawing ------------------------------------------------------------------

    def draw(self) -> None:
        """The header shows the state now; the page too, or the state when it was paused."""
        context, model = self.top.context(self.session), self.session.model
        banner = Banner(
            paused_at_s=self._frozen[1] if self._frozen else None,
            readonly=self.top.readonly and self.session.player is None,
            notice=self._notice,
            player=self.session.player.words() if self.session.player else "",
        )
        header = self.query_one("#header", LinesView)
        header.show_lines(header_lines(model, banner, self.size.width, context))
        tabs = self.query_one("#tabs", LinesView)
        tabs.show_lines([tab_line(TABS, self.page.id or "", self.size.width)])
        shown = self._frozen[0] if self._frozen else model
        self.page.draw(shown, context)

    def resized(self, event: events.Resize) -> None:
        width, height = event.size
        small = width < LEAST_WIDTH or height < LEAST_HEIGHT
        self.set_class(small, "small")
        if small:
            words = f"{width}x{height} is too small."
            self.query_one("#too-small", LinesView).show_lines(
                [
                    line((words, "bad")),
                    line(f"The least is {LEAST_WIDTH}x{LEAST_HEIGHT}."),
                    line("q quits."),
                ]
            )
        self.call_after_refresh(self.top.draw)

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.top.draw)

    # --- keys ---------------------------------------------------------------------

    def action_page(self, name: str) -> None:
        switcher = self.query_one("#pages", ContentSwitcher)
        if switcher.current == name:
            return
        self.page.left()
        self._leave_search()
        switcher.current = name
        self.page.entered()
        self.call_after_refresh(self.top.draw)

    def on_click(self, event: events.Click) -> None:
        if event.widget is not None and event.widget.id == "tabs":
            name = tab_at(TABS, event.x)
            if name is not None:
                self.action_page(name)

    def action_pause(self) -> None:
        if self._frozen is None:
            context = self.top.context(self.session)
            self._frozen = (self.session.model.frozen_copy(), context.now_s)
        else:
            self._frozen = None
        self.top.draw()

    def action_span(self) -> None:
        self.top.next_span()
        self.top.draw()

    def action_fleet(self) -> None:
        self.top.action_fleet()

    def action_player(self, what: str) -> None:
        player = self.session.player
        if player is None:
            return
        player.command(what)
        self.top.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "player":
            return self.session.player is not None
        if action == "freeze_all":
            return self.session.client is not None
        if action == "search":
            return self.page.searchable if self.is_mounted else True
        return True

    # --- search -------------------------------------------------------------------

    def action_search(self) -> None:
        search = self.query_one("#search", SearchLine)
        search.display = True
        search.focus()

    def on_input_changed(self, event: SearchLine.Changed) -> None:
        if event.input.id == "search":
            self.page.search(event.value)

    def on_search_line_left(self) -> None:
        self.query_one("#search").display = False
        self.page.entered()

    def _leave_search(self) -> None:
        search = self.query_one("#search", SearchLine)
        if search.display or search.value:
            search.value = ""
            search.display = False
            self.page.search("")

    # --- changes ------------------------------------------------------------------

    @work
    async def action_freeze_all(self) -> None:
        """One key from every page: an operator who must stop the policy must find it at once."""
        if self.may_change():
            await self.submit(changes.freeze_all(self.session.model), None)

    def may_change(self) -> bool:
        """Notifies the operator if not."""
        if self.session.client is None:
            self.notify("this is a recorded journal; nothing can be changed", severity="warning")
        elif self.top.readonly:
            self.notify(
                "read-only: start without --readonly to change something", severity="warning"
            )
        elif self.session.model.stale:
            self.notify("disconnected: the node cannot be asked now", severity="warning")
        else:
            return True
        return False

    async def submit(self, change: ChangeRequest, generation: int | None) -> None:
        """Ask the operator, then the node, and show its answer.

        ``generation`` is the policy's that the operator looked at when they began.
        """
        client = self.session.client
        if client is None or not self.may_change():
            return
        if not await self.app.push_screen_wait(ConfirmDialog(change)):
            return
        try:
            answer = await client.post(change.path, request_body(change, generation))
        except ViewError as error:
            self.notify(str(error), title=f"Refused: {change.title}", severity="error", timeout=15)
            return
        self.notify(answer_words(answer), title=change.title)
        self.feed.refresh_policy()


class FleetScreen(SteadyScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "span", "Span"),
        Binding("p", "pause", "Pause"),
    ]

    def __init__(self, sessions: Sequence[NodeSession]) -> None:
        super().__init__()
        self._sessions = sessions
        self._frozen: tuple[list[NodeModel], float] | None = None

    @property
    def top(self) -> TopApp:
        return cast("TopApp", self.app)

    def compose(self) -> ComposeResult:
        yield LinesView(id="header")
        yield TableView(id="fleet-table")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#header").can_focus = False
        self.query_one(TableView).focus()

    def draw(self) -> None:
        """The table now, or as it was when paused."""
        live = [session.model for session in self._sessions]
        models = worst_first(self._frozen[0] if self._frozen else live)
        context, width = self.top.context(), self.size.width
        since = self._frozen[1] if self._frozen else None
        self.query_one("#header", LinesView).show_lines(
            [
                ends(
                    line(("fleet ", "title"), f"{len(models)} nodes, worst first"),
                    line(
                        (f" PAUSED since {fmt.clock(since)} " if since else "", "alert"),
                        (f" {fmt.clock(context.now_s)}", "strong"),
                    ),
                    width,
                ),
                fleet_summary(models, width),
            ]
        )

        def row(index: int) -> Line:
            return fleet_line(models[index], width, context)

        self.query_one(TableView).show_rows(
            line((fleet_titles(width, context.span_s), "title")),
            [model.label for model in models],
            row,
        )

    def resized(self, event: events.Resize) -> None:
        self.call_after_refresh(self.top.draw)

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.top.draw)

    def action_span(self) -> None:
        self.top.next_span()
        self.top.draw()

    def action_pause(self) -> None:
        if self._frozen is None:
            copies = [session.model.frozen_copy() for session in self._sessions]
            self._frozen = (copies, self.top.context().now_s)
        else:
            self._frozen = None
        self.top.draw()

    def on_table_view_chosen(self, event: TableView.Chosen) -> None:
        self.top.open_node(str(event.key))


LEAST_WIDTH, LEAST_HEIGHT = 80, 24


_PAGES = (NodeScreen, FleetScreen)


def run_app(options: TopOptions) -> int:
    """Until the operator leaves. Raises ``ViewError`` when a journal cannot be read."""
    return asyncio.run(_run(options))


async def _run(options: TopOptions) -> int:
    async with AsyncExitStack() as held:
        if options.journal is not None:
            reader = JournalReader(options.journal)
            held.callback(reader.close)
            sessions = [journal_session(reader, options.journal.stem)]
        else:
            sessions = [
                live_session(await held.enter_async_context(NodeClient(address)))
                for address in options.addresses
            ]
        app = TopApp(
            sessions,
            readonly=options.readonly,
            theme=options.theme,
            ascii_only=options.ascii_only,
            no_color=options.no_color,
        )
        await app.run_async()
        return app.return_code or 0
