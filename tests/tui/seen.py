"""What a test looks at while an application runs: its node screen, page, table, feed and text."""

from __future__ import annotations

from typing import Any

from recorded_node import RecordedFeed
from textual.pilot import Pilot

from hisparsed.tui.screens.node_screen import NodeScreen
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView


def node_screen(pilot: Pilot[None]) -> NodeScreen:
    screen = next(one for one in pilot.app.screen_stack if isinstance(one, NodeScreen))
    assert isinstance(screen, NodeScreen)
    return screen


def page(pilot: Pilot[None], kind: type[Any]) -> Any:
    return node_screen(pilot).query_one(kind)


def table(pilot: Pilot[None]) -> TableView:
    return node_screen(pilot).page.query_one(TableView)


def feed(pilot: Pilot[None]) -> RecordedFeed:
    found = node_screen(pilot).feed
    assert isinstance(found, RecordedFeed)
    return found


def text(pilot: Pilot[None], selector: str) -> str:
    lines = pilot.app.screen.query_one(selector, LinesView).lines
    return "\n".join(one.plain for one in lines)
