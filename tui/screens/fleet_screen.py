"""Several nodes on one screen, worst first; Enter goes to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.steady import SteadyScreen
from hisparsed.tui.session import NodeSession
from hisparsed.tui.styled import Line, ends, line
from hisparsed.tui.views.fleet import fleet_line, fleet_summary, fleet_titles, worst_first
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView

if TYPE_CHECKING:
    from hisparsed.tui.app import TopApp


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
        """The table from what is known now, or from when it was paused."""
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
            line((fleet_titles(width), "title")), [model.label for model in models], row
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
