"""A thousand requests: the table sorts, scrolls, searches and opens, and follows each tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recorded_node import recorded

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.screens.dialogs import DetailDialog
from hisparsed.tui.screens.node_screen import NodeScreen
from hisparsed.tui.widgets.lines import LinesView
from hisparsed.tui.widgets.table import TableView

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
    model.apply(updates.RequestNews(requests()), 0)
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
        model.apply(updates.RequestNews(requests(age_s=1.0, count=COUNT - 1)), 0)
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
