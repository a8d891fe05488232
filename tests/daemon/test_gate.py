"""The gate: drain, session limits, metrics; and that it counts what is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hisparsed.daemon.gate import Gate, SessionLimit


class Node:
    """A gate around an application whose completions end when told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waiting = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

        async def complete(request: Request) -> JSONResponse:
            await request.body()
            await self.go_on.wait()
            return JSONResponse({"text": "ok"})

        async def models(_: Request) -> JSONResponse:
            return JSONResponse({"data": []})

        app = Starlette(
            routes=[
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/v1/models", models),
            ]
        )
        self.gate = Gate(
            app,
            clock=lambda: self.now_s,
            waiting_calls=lambda: self.waiting,
            metrics_page=lambda: b"hisparsed_up 1\n",
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.gate), base_url="http://node"
        )

    async def call(self, session: str | None = None) -> httpx.Response:
        headers = {"x-hisparsed-session": session} if session else {}
        return await self.client.post("/v1/completions", json={}, headers=headers)


@pytest.fixture
async def node() -> Node:
    return Node()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


async def test_requests_pass_and_are_counted_while_open(node: Node) -> None:
    node.go_on.clear()
    call = asyncio.create_task(node.call())
    await until(lambda: node.gate.open_requests == 1)
    node.go_on.set()
    assert (await call).json() == {"text": "ok"}
    assert node.gate.open_requests == 0


async def test_a_request_is_not_open_before_all_of_it_arrived(node: Node) -> None:
    parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    open_when_answered: list[int] = []

    async def send(_: Any) -> None:
        open_when_answered.append(node.gate.open_requests)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    call = asyncio.create_task(node.gate(scope, parts.get, send))
    parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await until(parts.empty)
    assert node.gate.open_requests == 0
    parts.put_nowait({"type": "http.request", "body": b"}", "more_body": False})
    await call
    assert set(open_when_answered) == {1}
    assert node.gate.open_requests == 0


async def test_a_draining_node_refuses_new_calls_and_finishes_open_ones(node: Node) -> None:
    node.go_on.clear()
    call = asyncio.create_task(node.call())
    await until(lambda: node.gate.open_requests == 1)
    node.gate.draining = True
    refused = await node.call()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["type"] == "node_draining"
    assert (await node.client.get("/v1/models")).status_code == 200
    node.go_on.set()
    assert (await call).status_code == 200
    assert node.gate.counters.refused_draining == 1


async def test_new_sessions_get_429_while_calls_wait_and_known_ones_pass(node: Node) -> None:
    assert (await node.call("known")).status_code == 200
    node.gate.limit = SessionLimit(max_waiting=2, retry_after_s=7.4)
    node.waiting = 2
    assert (await node.call("known")).status_code == 200
    refused = await node.call("new")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert (await node.call()).status_code == 429, "a call without a session counts as new"
    node.waiting = 1
    assert (await node.call("new")).status_code == 200
    assert node.gate.counters.refused_session == 2


async def test_nobody_is_refused_where_nothing_waits(node: Node) -> None:
    node.gate.limit = SessionLimit(max_waiting=0)
    assert (await node.call("new")).status_code == 200
    node.waiting = 1
    assert (await node.call("other")).status_code == 429


async def test_sessions_are_forgotten_after_their_time(node: Node) -> None:
    await node.call("old")
    node.gate.limit = SessionLimit(max_waiting=0)
    node.waiting = 1
    node.now_s = 299.0
    assert (await node.call("old")).status_code == 200
    node.now_s = 600.0
    assert (await node.call("old")).status_code == 429


async def test_metrics_are_served_without_the_application(node: Node) -> None:
    page = await node.client.get("/metrics")
    assert page.text == "hisparsed_up 1\n"
    assert page.headers["content-type"].startswith("text/plain")


async def test_an_application_error_does_not_leak_an_open_request() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("engine gone")

    gate = Gate(broken, clock=lambda: 0.0, waiting_calls=lambda: 0, metrics_page=lambda: b"")
    transport = httpx.ASGITransport(app=gate, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        assert (await client.post("/v1/completions", json={})).status_code == 500
    assert gate.open_requests == 0
