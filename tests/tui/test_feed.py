"""One stream a node: what it brings, and what happens when it ends, stays silent or is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fake_node import FakeNode
from recorded_node import recorded, status_with

from hisparsed.tui import updates
from hisparsed.tui.client import EventParser, NodeClient, Refused, Unreachable
from hisparsed.tui.feed import LONGEST_PAUSE_S, LiveFeed
from hisparsed.tui.options import parse_address
from hisparsed.tui.updates import Update


class Heard:
    """The updates of a feed; ``until`` waits for them without a clock."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._news = asyncio.Event()

    def tell(self, update: Update) -> None:
        self.updates.append(update)
        self._news.set()

    def of(self, kind: type[Update]) -> list[Update]:
        return [one for one in self.updates if isinstance(one, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def feeding(
    node: FakeNode, *, timeout_s: float = 5.0, pauses: list[float] | None = None
) -> AsyncIterator[tuple[Heard, LiveFeed]]:
    async def pause(seconds: float) -> None:
        if pauses is not None:
            pauses.append(seconds)
        await asyncio.sleep(0.01)

    heard = Heard()
    async with NodeClient(parse_address(str(node.path))) as client:
        feed = LiveFeed(client, heard.tell, sleep=pause, timeout_s=timeout_s)
        running = asyncio.create_task(feed.run())
        try:
            yield heard, feed
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_the_stream_and_the_past_arrive(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        assert isinstance(heard.updates[0], updates.Connected)
        assert heard.of(updates.StatusUpdate)[0].document == recorded("status")
        assert heard.of(updates.HistoryUpdate)[0].document == recorded("history")
        node.send("decisions", [{"sequence": 1}])
        node.send("logs", [{"sequence": 2}])
        node.send("event", {"sequence": 3})
        await heard.until(lambda: bool(len(heard.of(updates.EventUpdate)) == 2))
        assert updates.DecisionUpdate([{"sequence": 1}]) in heard.updates
        assert updates.LogUpdate([{"sequence": 2}]) in heard.updates
    assert node.streams == 1


async def test_each_part_of_the_past_is_asked_for_once(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        node.send("status", status_with({"loop.tick": 77}))
        await heard.until(lambda: len(heard.of(updates.StatusUpdate)) == 2)
    assert sorted(node.gets) == [
        "/v1/decisions", "/v1/history", "/v1/journal/events", "/v1/logs", "/v1/policy",
        "/v1/policy/keys",
    ]  # fmt: skip


async def test_nothing_is_asked_between_ticks(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        asked = len(node.gets)
        for _ in range(20):
            node.send("status", recorded("status"))
        await heard.until(lambda: len(heard.of(updates.StatusUpdate)) == 21)
        assert len(node.gets) == asked


async def test_requests_are_asked_for_only_while_wanted_and_one_at_a_time(node: FakeNode) -> None:
    async with feeding(node) as (heard, feed):
        await heard.until(lambda: bool(heard.of(updates.LogUpdate)))
        assert "/v1/requests" not in node.gets
        feed.want_requests = True
        node.open.clear()
        for _ in range(5):
            node.send("status", recorded("status"))
        await heard.until(lambda: len(heard.of(updates.StatusUpdate)) == 6)
        node.open.set()
        await heard.until(lambda: bool(heard.of(updates.RequestUpdate)))
        assert node.gets.count("/v1/requests") == 1


async def test_another_policy_is_asked_for(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        before = node.gets.count("/v1/policy")
        node.send("status", status_with({"policy.generation": 9}))
        await heard.until(lambda: node.gets.count("/v1/policy") == before + 1)


async def test_a_node_without_some_routes_is_shown_without_them(node: FakeNode) -> None:
    node.missing = {"history", "logs", "requests"}
    async with feeding(node) as (heard, feed):
        await heard.until(lambda: bool(heard.of(updates.DecisionUpdate)))
        feed.refresh_requests()
        await heard.until(lambda: bool(heard.of(updates.RequestUpdate)))
        assert heard.of(updates.RequestUpdate)[0].document is None
        assert not heard.of(updates.HistoryUpdate)


async def test_an_engine_that_dies_is_known_at_once_though_no_tick_follows(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        restarting = status_with({"engine.state": "restarting"})
        node.answers["status"] = restarting
        node.send("event", {"sequence": 8, "kind": "value-set"})
        node.send("event", {"sequence": 9, "kind": "engine-died"})
        await heard.until(lambda: len(heard.of(updates.StatusUpdate)) == 2)
        assert updates.StatusUpdate(restarting) in heard.updates
        assert node.gets.count("/v1/status") == 1


async def test_a_daemon_that_stops_is_found_again(node: FakeNode) -> None:
    pauses: list[float] = []
    async with feeding(node, pauses=pauses) as (heard, _):
        await heard.until(lambda: bool(heard.of(updates.StatusUpdate)))
        await node.stop()
        await heard.until(lambda: pauses.count(LONGEST_PAUSE_S) > 1)
        assert "no daemon has this socket" in heard.updates[-1].why
        first = len(pauses) - 1 - pauses[::-1].index(0.5)
        assert pauses[first : first + 5] == [0.5, 1.0, 2.0, 4.0, LONGEST_PAUSE_S]
        assert set(pauses[first + 5 :]) == {LONGEST_PAUSE_S}
        connected = len(heard.of(updates.Connected))
        await node.start()
        await heard.until(lambda: len(heard.of(updates.Connected)) > connected)
        before = len(pauses)
        await node.stop()
        await heard.until(lambda: len(pauses) > before)
        assert pauses[before] == 0.5, "an answer makes the pauses short again"


async def test_a_silent_node_counts_as_lost(node: FakeNode) -> None:
    node.open.clear()
    async with feeding(node, timeout_s=0.05) as (heard, _):
        await heard.until(lambda: bool(heard.of(updates.Lost)))
        assert "does not answer" in heard.updates[0].why
        node.open.set()


async def test_unreadable_news_are_left_out(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(lambda: bool(heard.of(updates.StatusUpdate)))
        node.send("status", ["not", "an", "object"])
        node.send("of-a-later-version", {})
        node.send("status", status_with({"loop.tick": 77}))
        await heard.until(lambda: len(heard.of(updates.StatusUpdate)) == 2)
        assert heard.of(updates.StatusUpdate)[1].document["loop"]["tick"] == 77


def test_event_streams_are_taken_apart() -> None:
    parser = EventParser()
    lines = ["event: status", "data: {", "data: }", "", ": comment", "", "data: x", ""]
    found = [event for one in lines if (event := parser.feed(one)) is not None]
    assert found == [("status", "{\n}"), ("message", "x")]


async def test_a_refusal_keeps_the_node_s_words() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409, json={"error": {"code": "stale_generation", "message": "look"}})

    async with NodeClient(
        parse_address("http://node:1"), transport=httpx.MockTransport(answer)
    ) as client:
        with pytest.raises(Refused, match="look") as refused:
            await client.post("/v1/freeze", {})
    assert (refused.value.status, refused.value.code) == (409, "stale_generation")


@pytest.mark.parametrize("answer", [b"<html>", b"[1]", b""])
async def test_an_answer_that_is_no_json_object_is_refused(answer: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    async with NodeClient(parse_address("http://node:1"), transport=transport) as client:
        with pytest.raises(Refused, match="was not answered with JSON"):
            await client.get("/v1/status")


async def test_nobody_on_a_socket_is_said_in_words(tmp_path: Path) -> None:
    async with NodeClient(parse_address(str(tmp_path / "none.sock"))) as client:
        with pytest.raises(Unreachable, match="no daemon has this socket"):
            await client.get("/v1/status")


async def test_a_storm_of_events_asks_for_the_policy_once_at_a_time(node: FakeNode) -> None:
    async with feeding(node) as (heard, _):
        await heard.until(
            lambda: bool(heard.of(updates.KeyUpdate) and heard.of(updates.PolicyUpdate))
        )
        before = node.gets.count("/v1/policy")
        told = len(heard.of(updates.PolicyUpdate))
        node.open.clear()
        for sequence in range(50):
            node.send("event", {"sequence": sequence})
            last = updates.EventUpdate([{"sequence": sequence}])
            await heard.until(lambda last=last: last in heard.updates)  # type: ignore[misc]
        node.open.set()
        await heard.until(lambda: len(heard.of(updates.PolicyUpdate)) >= told + 2)
        assert node.gets.count("/v1/policy") - before == 2
