"""The pages of requests, a thousand of them, and of logs and health.

The table sorts, scrolls, searches and opens, and follows each tick. Log lines are filtered and
followed; doctor and canary are shown. The keys of all pages are in test_app.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recorded_node import feed, node_screen, page, recorded, status_with, text

from hisparsed.tui import updates
from hisparsed.tui.app import NodeScreen, TopApp
from hisparsed.tui.dialogs import DetailDialog
from hisparsed.tui.pages import LogsPage
from hisparsed.tui.widgets import LinesView, TableView

COUNT = 1_000


def requests(age_s: float = 0.0, count: int = COUNT) -> dict[str, Any]:
    template = recorded("requests")["rows"][0]
    rows = [
        {**template, "request_id": f"cmpl-{index:04}", "age_s": age_s + index}
        for index in range(count)
    ]
    return {**recorded("requests"), "rows": rows, "running": count, "waiting": 0, "omitted": 0}


async def test_a_thousand_requests_are_a_table_like_any_other(
    make_app: Callable[..., TopApp],
) -> None:
    app = make_app()
    model = app.sessions[0].model
    model.apply(updates.RequestUpdate(requests()), 0)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        table = app.screen.page.query_one(TableView)
        assert len(table.keys) == COUNT
        assert (table.keys[0], table.cursor_key) == ("cmpl-0999", "cmpl-0999")
        await pilot.press("G")
        assert table.cursor_key == "cmpl-0000"
        assert table.scroll_offset.y > COUNT - 24
        await pilot.press("k", "r")
        assert table.cursor_key == "cmpl-0001", "the cursor stays on its request"
        model.apply(updates.RequestUpdate(requests(age_s=1.0, count=COUNT - 1)), 0)
        app.draw()
        assert (len(table.keys), table.cursor_key) == (COUNT - 1, "cmpl-0001")
        await pilot.press("slash", *"0777", "enter")
        await pilot.pause()
        assert list(table.keys) == ["cmpl-0777"]
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, DetailDialog)
        shown = "\n".join(one.plain for one in app.screen.query_one("#detail", LinesView).lines)
        assert "cmpl-0777" in shown


Make = Callable[..., TopApp]


async def test_v_and_o_filter_log_lines(make_app: Make) -> None:
    async with make_app().run_test(size=(100, 30)) as pilot:
        await pilot.press("5", "v")
        await pilot.pause()
        logs = page(pilot, LogsPage)
        assert logs.filter.level == 30
        assert " info " not in text(pilot, "#log-lines")
        await pilot.press("v", "v", "o")
        assert (logs.filter.level, logs.filter.source) == (0, "daemon")
        await pilot.press("o")
        await pilot.pause()
        assert " daemon " not in text(pilot, "#log-lines")
        await pilot.press("slash", *"nothing like it")
        await pilot.pause()
        assert text(pilot, "#log-lines") == "no entries"


async def test_statistics_do_not_fill_the_log_page_and_tracebacks_stay_whole(
    make_app: Make,
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        long = "\n".join(f"line {index}" for index in range(28))
        for sequence, level in ((9_998, 20), (9_999, 40)):
            entry = {"sequence": sequence, "at_unix_s": 1.0, "source": "engine", "level": level}
            feed(pilot).say(updates.LogUpdate([{**entry, "text": long}]))
        app.draw()
        await pilot.pause()
        shown = text(pilot, "#log-lines")
        assert shown.count("line 5\n") == 2
        assert shown.count("line 6\n") == 1
        assert "22 more lines" in shown


async def test_new_log_lines_are_followed_only_at_the_end(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await pilot.pause()
        view = pilot.app.screen.query_one("#log-lines", LinesView)
        assert view.scroll_offset.y == view.max_scroll_y > 0
        await pilot.press("pageup")
        await pilot.pause()
        place = view.scroll_offset.y
        line = {"sequence": 9_999, "at_unix_s": 1.0, "source": "engine", "level": 40, "text": "x"}
        feed(pilot).say(updates.LogUpdate([line]))
        pilot.app.draw()  # type: ignore[attr-defined]
        await pilot.pause()
        assert view.scroll_offset.y == place
        await pilot.press("G")
        await pilot.pause()
        assert view.scroll_offset.y == view.max_scroll_y


def without(*names: str) -> dict[str, Any]:
    """The answers of a node of an earlier version."""
    return {name: value for name, value in recorded("status").items() if name not in names}


async def test_doctor_and_canary_are_shown_where_a_node_has_them(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("5")
        await pilot.pause()
        shown = text(pilot, "#health")
        assert "WARN  leaked-memory: /dev/shm/vllm_offload" in shown
        assert "note  clock: nothing keeps the clock right; timedatectl" in shown
        assert "ok  24 tokens equal" in shown
        for status, words in (
            (status_with({"doctor": None, "canary": None}), "not yet; it comes with the engine"),
            (without("doctor", "canary"), "not available in this version"),
        ):
            feed(pilot).say(updates.StatusUpdate(status))
            app.draw()
            await pilot.pause()
            assert text(pilot, "#health").count(words) == 2


async def test_d_shows_all_that_the_doctor_found(make_app: Make) -> None:
    async with make_app().run_test(size=(80, 24)) as pilot:
        await pilot.press("5", "d")
        await pilot.pause()
        assert isinstance(pilot.app.screen, DetailDialog)
        shown = text(pilot, "#detail")
        assert "why  memory in /dev/shm outlives the engine" in shown
        assert "fix  hisparsed doctor --fix" in shown
        assert "seen 2026-11-29 20:14:00" in shown
        await pilot.press("escape")
        await pilot.pause()
        assert node_screen(pilot).page.id == "logs"
