"""The recorded answers of a reference node under load, a feed that repeats them, and what a test
sees.

``node_screen``, ``page``, ``table``, ``feed`` and ``text`` look at an application that runs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from hisparsed.tui import updates
from hisparsed.tui.app import NodeScreen
from hisparsed.tui.client import Refused
from hisparsed.tui.model import NodeModel
from hisparsed.tui.updates import Update
from hisparsed.tui.widgets import LinesView, TableView
from hisparsed.tui.wire import Document

FOLDER = Path(__file__).parent / "recorded"


@cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text("utf-8")


def recorded(name: str) -> Any:
    """A fresh copy of a recorded answer."""
    return json.loads(_text(name))


def status_with(changes: dict[str, Any]) -> Document:
    """The recorded status with values at dotted paths replaced."""
    status: Document = recorded("status")
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = status
        for parent in parents:
            place = place[parent]
        place[last] = value
    return status


def recorded_model(label: str = "node-1") -> NodeModel:
    model = NodeModel(label, "/run/hisparsed/control.sock")
    for update in recorded_updates():
        model.apply(update, recorded("status")["at_unix_s"])
    return model


def recorded_updates() -> list[Update]:
    return [
        updates.Connected(),
        updates.StatusUpdate(recorded("status")),
        updates.HistoryUpdate(recorded("history")),
        updates.PolicyUpdate(recorded("policy")),
        updates.KeyUpdate(recorded("keys")),
        updates.DecisionUpdate(recorded("decisions")["decisions"]),
        updates.EventUpdate(recorded("events")["events"]),
        updates.LogUpdate(recorded("logs")["lines"]),
        updates.RequestUpdate(recorded("requests")),
    ]


class RecordedFeed:
    """Sends nothing unasked; notes what it is asked for. ``say`` is the test's."""

    def __init__(self, tell: Callable[[Update], None]) -> None:
        self.say = tell
        self.want_requests = False
        self.asked: list[Any] = []

    async def run(self) -> None:
        """The model has been filled before."""

    async def tick(self, entry: Document) -> Document:
        self.asked.append(("tick", entry["sequence"]))
        tick: Document = recorded("tick")
        if entry["sequence"] != tick["sequence"]:
            raise Refused(404, "not_found", "the journal holds no such tick")
        return copy.deepcopy(tick)

    def refresh_requests(self) -> None:
        self.asked.append("requests")

    def refresh_policy(self) -> None:
        self.asked.append("policy")

    def refresh_decisions(self, lever: str | None, code: str | None) -> None:
        self.asked.append(("decisions", lever, code))


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
