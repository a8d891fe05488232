"""A node's words are only text: whatever it sends, the view keeps working and shows it as text."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recorded_node import recorded

from hisparsed.tui import changes, updates
from hisparsed.tui import format as fmt
from hisparsed.tui.app import TopApp
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, line
from hisparsed.tui.views import decisions, health, logs, policy, requests
from hisparsed.tui.views.decisions import decision_detail, event_detail
from hisparsed.tui.views.drawing import ViewContext, cells_of
from hisparsed.tui.views.fleet import fleet_line, fleet_summary, worst_first
from hisparsed.tui.views.header import Banner, header_lines
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.widgets import LinesView
from hisparsed.tui.wire import items

Make = Callable[..., TopApp]
NAMES = ("status", "policy", "history", "decisions", "events", "logs", "requests")
WEIRD: tuple[Any, ...] = (
    None, "", "[red]x[/b]", "\x1b[31mboo\x07\n\nx", "\u202e\u200b\u0301宽宽", float("inf"),
    float("-inf"), float("nan"), -1, 0, 10**30, 1e308, True, [], {}, [1, "a", None],
    {"x": 1}, [{"a": []}], "x" * 3_000,
)  # fmt: skip
CONTEXT = ViewContext(now_s=recorded("status")["at_unix_s"])
BEYOND_CALENDARS_S = 1e13


def paths(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = document.items() if isinstance(document, dict) else ()
    if isinstance(document, list):
        entries = list(enumerate(document[:4]))
    for key, value in entries:
        yield (*above, key)
        yield from paths(value, (*above, key))


def told(documents: dict[str, Any]) -> NodeModel:
    model = NodeModel("n", "a")
    for update in (
        updates.Connected(),
        updates.HistoryUpdate(documents["history"]),
        updates.PolicyUpdate(documents["policy"]),
        updates.DecisionUpdate(items(documents["decisions"], "decisions")),
        updates.EventUpdate(items(documents["events"], "events")),
        updates.LogUpdate(items(documents["logs"], "lines")),
        updates.RequestUpdate(documents["requests"]),
        updates.StatusUpdate(documents["status"]),
    ):
        model.apply(update, CONTEXT.now_s)
    return model


def everything(model: NodeModel) -> Iterator[Line]:
    """All that any page shows of a node."""
    for width, height in ((80, 20), (120, 36), (200, 56)):
        yield from header_lines(model, Banner(), width, CONTEXT)
        yield from overview_lines(model, width, height, CONTEXT)
        yield fleet_line(model, width, CONTEXT)
        for row in requests.sorted_rows(model, requests.Order()):
            yield requests.request_row(row, width, CONTEXT)
            yield from requests.request_detail(row, width)
    yield fleet_summary(worst_first([model]), 80)
    yield from policy.summary_lines(model, 80, CONTEXT)
    for row in policy.policy_rows(model, now_s=CONTEXT.now_s):
        yield policy.policy_row_line(model, row, 120)
        yield from policy.key_lines(model, row.key, 80)
    for entry in decisions.entries(model, decisions.Filter(every_tick=True))[:20]:
        yield decisions.entry_line(model, entry, CONTEXT)
        if decisions.is_event(entry):
            yield from event_detail(entry, 60)
        else:
            yield from decision_detail(entry, None, 60)
    yield from logs.log_lines(model, logs.LogFilter(), 80)
    yield from health.health_lines(model, 80, CONTEXT)
    yield from health.doctor_lines(model, 80)
    yield line(changes.freeze(model, "split").title)


@pytest.mark.parametrize("rounds", [25, pytest.param(120, marks=pytest.mark.long)])
def test_no_value_anywhere_in_what_a_node_says_breaks_a_page(rounds: int) -> None:
    chosen = random.Random(7)
    good = {name: recorded(name) for name in NAMES}
    places = {name: list(paths(document)) for name, document in good.items()}
    for _ in range(rounds):
        name = chosen.choice(NAMES)
        *parents, last = chosen.choice(places[name])
        documents = {**good, name: copy.deepcopy(good[name])}
        section = documents[name]
        for parent in parents:
            section = section[parent]
        section[last] = copy.deepcopy(chosen.choice(WEIRD))
        shown = "".join(one.plain for one in everything(told(documents)))
        assert not any(one in shown for one in "\x1b\x07\n\u202e")


def test_parts_of_more_than_their_whole_share_the_bar() -> None:
    assert cells_of([3e9, 1e9], 1.0, 40) == [30, 10]


def test_a_time_that_no_calendar_reaches_is_unknown() -> None:
    assert fmt.clock(BEYOND_CALENDARS_S) == fmt.moment(-1e300) == fmt.UNKNOWN


def test_true_is_written_as_in_the_policy() -> None:
    assert fmt.setting(True) == "true"


@pytest.mark.parametrize("message", ['"[/b]" is not one of act', "[red]", "[a, b]"])
async def test_brackets_in_a_notice_are_only_brackets(make_app: Make, message: str) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        app.screen.notify(message, title="[/x]", severity="error")
        await pilot.pause()
        toast = app.screen.query_one("Toast")
        assert message in str(toast.render())


async def test_an_override_with_a_far_end_is_shown_without_one(make_app: Make) -> None:
    app = make_app()
    document = recorded("policy")
    document["overrides"][0]["expires_unix_s"] = BEYOND_CALENDARS_S
    app.sessions[0].model.apply(updates.PolicyUpdate(document), 0)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await pilot.pause()
        lines = app.screen.query_one("#policy-summary", LinesView).lines
        (shown,) = [one.plain for one in lines if one.plain.startswith("OVERRIDE")]
        assert "until -" in shown
