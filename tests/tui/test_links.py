"""The application on nodes that go, come back, restart their engine, or answer slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fake_node import FakeNode
from recorded_node import recorded, status_with
from textual.pilot import Pilot

from hisparsed.tui.address import parse_address
from hisparsed.tui.app import TopApp
from hisparsed.tui.client import NodeClient
from hisparsed.tui.live_feed import LiveFeed
from hisparsed.tui.model import NodeModel
from hisparsed.tui.session import NodeSession
from hisparsed.tui.widgets.lines import LinesView


@asynccontextmanager
async def showing(node: FakeNode) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    now_s = recorded("status")["at_unix_s"]
    async with NodeClient(parse_address(f"n={node.path}")) as client:
        model = NodeModel("n", str(node.path))

        async def pause(_: float) -> None:
            await asyncio.sleep(0.02)

        session = NodeSession(model, lambda tell: LiveFeed(client, tell, sleep=pause), client)
        app = TopApp([session], clock=lambda: now_s)
        async with app.run_test(size=(120, 40)) as pilot:
            yield app, pilot


async def until(app: TopApp, pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            app.draw()
            await pilot.pause(0.02)


def shown(app: TopApp, selector: str) -> str:
    return "\n".join(one.plain for one in app.screen.query_one(selector, LinesView).lines)


async def test_a_daemon_killed_and_restarted_is_shown_so(node: FakeNode) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: "host budget" in shown(app, "#overview-lines"))
        await until(app, pilot, lambda: "TTFT -" not in shown(app, "#overview-lines"))
        await until(app, pilot, lambda: app.sessions[0].model.policy is not None)
        before = shown(app, "#overview-lines")
        await node.stop()
        await until(app, pilot, lambda: "disconnected since" in shown(app, "#header"))
        assert shown(app, "#overview-lines") == before
        assert app.screen.query_one("#overview-lines", LinesView)._stale
        await pilot.press("2", "3", "4", "5", "1")
        await node.start()
        await until(app, pilot, lambda: "report " in shown(app, "#header"))
        assert "disconnected" not in shown(app, "#header")
        assert not app.screen.query_one("#overview-lines", LinesView)._stale


async def test_an_engine_that_restarts_leaves_gaps_and_no_crash(node: FakeNode) -> None:
    async with showing(node) as (app, pilot):
        await until(app, pilot, lambda: "host budget" in shown(app, "#overview-lines"))
        node.send("status", status_with({"lifecycle": "starting", "observed": None, "levers": []}))
        await until(app, pilot, lambda: "has not reported yet" in shown(app, "#header"))
        for key in "23451":
            await pilot.press(key)
        at = recorded("status")["at_unix_s"]
        counters = {
            "observed.serving.generated_tokens_total": 0,
            "observed.hot.loads_total": 0,
            "at_unix_s": at + 2,
        }
        node.send("status", status_with(counters))
        await until(app, pilot, lambda: "report " in shown(app, "#header"))
        history = app.sessions[0].model.history
        assert history.buckets("tokens", 2, 1, end_s=at + 2) == [None]


async def test_a_slow_node_never_holds_the_keys_up(node: FakeNode) -> None:
    node.open.clear()
    async with showing(node) as (app, pilot):
        await pilot.press("3", "question_mark", "escape", "5", "p")
        assert "connecting to" in shown(app, "#header")
        assert "PAUSED" in shown(app, "#header")
        node.open.set()
        await until(app, pilot, lambda: app.sessions[0].model.status is not None)
