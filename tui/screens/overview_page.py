"""Page 1: the overview, one drawing for the room there is."""

from __future__ import annotations

from textual.app import ComposeResult

from hisparsed.tui.model import NodeModel
from hisparsed.tui.screens.page import Page
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.widgets.lines import LinesView


class OverviewPage(Page):
    def compose(self) -> ComposeResult:
        yield LinesView(id="overview-lines")

    def show_model(self, model: NodeModel, context: ViewContext) -> None:
        view = self.query_one("#overview-lines", LinesView)
        width, height = view.size
        if width and height:
            view.show_lines(overview_lines(model, width, height, context), stale=model.outdated)

    def entered(self) -> None:
        self.query_one("#overview-lines").focus()
