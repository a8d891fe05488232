"""The screen of one node: header, pages, search, and the footer with the keys of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher, Footer

from hisparsed.tui.changes import Change, answer_words, request_body
from hisparsed.tui.errors import ViewError
from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.decisions_page import DecisionsPage
from hisparsed.tui.screens.dialogs import ConfirmDialog
from hisparsed.tui.screens.logs_page import LogsPage
from hisparsed.tui.screens.overview_page import OverviewPage
from hisparsed.tui.screens.page import Page
from hisparsed.tui.screens.policy_page import PolicyPage
from hisparsed.tui.screens.requests_page import RequestsPage
from hisparsed.tui.screens.steady import SteadyScreen
from hisparsed.tui.session import Feed, NodeSession
from hisparsed.tui.styled import line
from hisparsed.tui.views.header import Banner, PageTab, header_lines, tab_at, tab_line
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.search import SearchLine

if TYPE_CHECKING:
    from hisparsed.tui.app import TopApp

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
TABS = (
    PageTab("1", "Overview", "overview"),
    PageTab("2", "Decisions", "decisions"),
    PageTab("3", "Requests", "requests"),
    PageTab("4", "Policy", "policy"),
    PageTab("5", "Logs & health", "logs"),
)


class NodeScreen(SteadyScreen[None]):
    """One node. The application calls ``draw`` when there is news, and every second."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(tab.key, f"page('{tab.name}')", tab.title, show=False) for tab in TABS),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("p", "pause", "Pause"),
        Binding("w", "span", "Span", show=False),
        Binding("space", "player('toggle')", "Play/stand", show=False),
        Binding("plus,equals_sign", "player('faster')", "Faster", show=False),
        Binding("minus", "player('slower')", "Slower", show=False),
        Binding("left", "player('back')", "Back", show=False),
        Binding("right", "player('on')", "On", show=False),
        Binding("shift+left", "player('far_back')", "Far back", show=False),
        Binding("shift+right", "player('far_on')", "Far on", show=False),
        Binding("left_square_bracket", "player('previous_move')", "Move before", show=False),
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
        """Header from what is known now; the page from that, or from when it was paused."""
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
                    line(f"{LEAST_WIDTH}x{LEAST_HEIGHT} is the least."),
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

    def may_change(self) -> bool:
        """Says so when not."""
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

    async def submit(self, change: Change, generation: int | None) -> None:
        """Ask the operator, then the node, and say what it answered.

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
