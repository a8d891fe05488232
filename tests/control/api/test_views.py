"""The read-only views: requests on demand, log lines, history, and one tick whole."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.views import ApiViews
from hisparsed.control.status.history import COARSE_S, FINE_S, FINE_SPAN_S, SPAN_S, History
from hisparsed.engine.messages import RequestRow, RequestTable
from hisparsed.logs.ring import LogRing
from hisparsed.policy.derived import HISTORY

ROW = RequestRow(
    request_id="cmpl-1",
    state="running",
    residency="mixed",
    context_tokens=900,
    computed_tokens=899,
    resident_share=0.25,
    hot_rows=90,
    hot_capacity_rows=128,
    references=100,
    resident=10,
    hits=80,
    loads=10,
    preemptions=0,
    age_s=1.5,
)


@pytest.fixture
def engine() -> SimpleNamespace:
    """None serves while ``requests`` is ``None``."""
    return SimpleNamespace(requests=None)


@pytest.fixture
def views(node: Any, engine: SimpleNamespace) -> ApiViews:
    views = ApiViews(
        node.journal, node.broadcast, LogRing(), History(), engine=lambda: engine.requests
    )
    node.on_tick.append(views.watch)
    return views


@pytest.fixture
async def http(node: Any, views: ApiViews) -> AsyncIterator[httpx.AsyncClient]:
    api = ControlApi(
        node.current, node.operator, node.source, node.journal, node.broadcast, views.routes()
    )
    transport = httpx.ASGITransport(app=api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


async def test_requests_are_asked_of_the_engine_only_on_demand(
    node: Any, engine: SimpleNamespace, http: httpx.AsyncClient
) -> None:
    asked = 0

    async def table() -> RequestTable:
        nonlocal asked
        asked += 1
        return RequestTable(rows=[ROW], running=1, waiting=4, omitted=4, took_us=20.0)

    assert (await http.get("/v1/requests")).json()["error"]["code"] == "not_ready"
    engine.requests = table
    await node.loop.start()
    await node.ticks(3)
    assert asked == 0
    answer = (await http.get("/v1/requests")).json()
    assert asked == 1
    assert answer["rows"] == [ROW.model_dump()]
    assert answer["omitted"] == 4


async def test_a_busy_engine_is_said(engine: SimpleNamespace, http: httpx.AsyncClient) -> None:
    async def late() -> RequestTable:
        raise TimeoutError("took over 30 s")

    engine.requests = late
    response = await http.get("/v1/requests")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")


async def test_log_lines_by_level_and_source(views: ApiViews, http: httpx.AsyncClient) -> None:
    views.logs.add("daemon", 1.0, logging.INFO, "hisparsed.control", "one")
    views.logs.add("engine", 2.0, logging.WARNING, "vllm.core", "two")
    views.logs.add("engine", 3.0, logging.INFO, "vllm.core", "three")

    async def texts(query: str) -> list[str]:
        return [line["text"] for line in (await http.get(f"/v1/logs{query}")).json()["lines"]]

    assert await texts("") == ["one", "two", "three"]
    assert await texts("?limit=2") == ["two", "three"]
    assert await texts("?level=30") == ["two"]
    assert await texts("?source=daemon") == ["one"]
    assert (await http.get("/v1/logs?source=moon")).json()["error"]["code"] == "bad_query"


async def test_new_log_lines_are_streamed_once_a_tick(node: Any, views: ApiViews) -> None:
    await node.loop.start()
    with node.broadcast.listen() as messages:
        views.logs.add("daemon", 1.0, logging.INFO, "hisparsed", "one")
        views.logs.add("engine", 1.1, logging.INFO, "vllm", "two")
        await node.ticks(2)
        node.broadcast.close()
        sent = [json.loads(one.data) async for one in messages if one.kind == "logs"]
    assert [[line["text"] for line in lines] for lines in sent] == [["one", "two"]]


async def test_history_has_a_row_a_second_whatever_the_tick(
    node: Any, http: httpx.AsyncClient
) -> None:
    await node.loop.start()
    for _ in range(20):
        await node.loop.tick()
        node.clock.now_s += 0.25
    answer = (await http.get("/v1/history")).json()
    assert answer["columns"] == ["at_unix_s", *HISTORY]
    times = [row[0] for row in answer["rows"]]
    assert [later - earlier for earlier, later in pairwise(times)] == [1.0] * 4
    row = dict(zip(answer["columns"], answer["rows"][-1], strict=True))
    assert row["observed.requests.running"] == 3
    assert row["observed.hot.loads_total"] == 60
    assert len((await http.get("/v1/history?span_s=2")).json()["rows"]) == 3


async def test_history_is_bounded_and_spans_two_hours(
    node: Any, views: ApiViews, http: httpx.AsyncClient
) -> None:
    await node.loop.start()
    await node.ticks(1)
    outcome = node.current._last
    for second in range(int(SPAN_S) + 3_600):
        views.history.watch(_later(outcome, float(second)))
    rows = views.history.document()["rows"]
    assert len(rows) <= FINE_SPAN_S / FINE_S + SPAN_S / COARSE_S + 2
    assert rows[-1][0] - rows[0][0] == pytest.approx(SPAN_S, abs=COARSE_S)
    times = [row[0] for row in rows]
    assert times == sorted(set(times))


def _later(outcome: Any, seconds: float) -> Any:
    record = replace(outcome.record, at_unix_s=outcome.record.at_unix_s + 1 + seconds)
    return replace(outcome, record=record)


@pytest.fixture
def journal(node: Any) -> Iterator[Any]:
    node.journal.start()
    yield node.journal
    node.journal.close()


async def _written(journal: Any, count: int) -> None:
    async with asyncio.timeout(10):
        while journal.health.written < count:
            await asyncio.to_thread(journal._thread.join, 0.01)


async def test_a_tick_is_found_whole_in_memory_and_in_the_file(
    node: Any, journal: Any, http: httpx.AsyncClient
) -> None:
    await node.loop.start()
    await node.ticks(5)
    ticks = journal.ticks
    asked = f"/v1/decisions/{ticks[1].sequence}?at={ticks[1].at_unix_s}"
    fresh = (await http.get(asked)).json()
    assert fresh["decision"]["tick"] == 2
    assert fresh["snapshot"]["geometry"]["block_tokens"] == 16
    assert fresh["after"]["snapshot"]["tick"] == 5
    await _written(journal, 6)
    journal._ticks.clear()
    stored = (await http.get(asked)).json()
    assert stored == fresh
    assert (await http.get(f"/v1/decisions/{ticks[1].sequence}")).json() == fresh


async def test_a_tick_that_is_nowhere_is_not_found(http: httpx.AsyncClient) -> None:
    response = await http.get("/v1/decisions/77")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_a_move_has_its_confirmation(node: Any, http: httpx.AsyncClient) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(2)
    moves = [one for one in node.journal.ticks if one.applied is not None]
    assert moves, "the scripted engine gives the policy something to do"
    whole = (await http.get(f"/v1/decisions/{moves[0].sequence}")).json()
    assert whole["applied"]["result"] is not None
    assert whole["confirmation"] == {"tick": moves[0].decision.tick, "differences": []}
