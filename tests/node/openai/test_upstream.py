"""What clients get while there is no engine, when theirs dies, and when their time is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.upstream import Upstream

AWAY = Refusal(503, "engine_unavailable", "the engine is being restarted", 7.0)
CUT = Refusal(503, "engine_unavailable", "your time is over", 3.0)


class Engine:
    """An application like vLLM's, whose engine can die."""

    def __init__(self) -> None:
        self.alive = True
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = False
        self.app = Starlette(
            routes=[
                Route("/whole", self.whole),
                Route("/stream", self.stream),
                Route("/broken", self.broken),
            ]
        )

    def is_alive(self) -> bool:
        return self.alive

    def die(self) -> None:
        self.alive = False
        self.go_on.set()

    async def whole(self, _: Request) -> Response:
        self.began.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if not self.alive:
            return JSONResponse({"error": {"code": 500}}, status_code=500)
        return JSONResponse({"text": "ok"})

    async def stream(self, _: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b'data: {"text": "a"}\n\n'
            self.began.set()
            await self.go_on.wait()
            if not self.alive:
                yield b'data: {"error": {"code": 500}}\n\n'
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def broken(self, _: Request) -> Response:
        return JSONResponse({"error": {"code": 500}}, status_code=500)


class Edge(Upstream):
    """``serving`` is the engine that serves now."""

    def __init__(self) -> None:
        super().__init__(lambda: self.serving, lambda: AWAY)
        self.serving: Any = None

    def take_away(self) -> None:
        self.serving = None
        self.cut(CUT)


@pytest.fixture
async def upstream() -> Edge:
    return Edge()


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def http(upstream: Edge) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=upstream)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


def is_refusal(response: httpx.Response, refusal: Refusal) -> bool:
    assert refusal.retry_after_s is not None
    return (
        response.status_code == refusal.status
        and response.headers["retry-after"] == f"{refusal.retry_after_s:.0f}"
        and response.json() == json.loads(refusal.error())
    )


async def begun(engine: Engine, call: Any) -> asyncio.Task[httpx.Response]:
    """A call whose answer the application has begun to make."""
    task: asyncio.Task[httpx.Response] = asyncio.create_task(call)
    await engine.began.wait()
    return task


async def test_without_an_engine_calls_get_503_and_when_to_come_back(
    http: httpx.AsyncClient,
) -> None:
    response = await http.get("/whole")
    assert is_refusal(response, AWAY)
    assert response.json()["error"] == {
        "message": AWAY.message,
        "type": "engine_unavailable",
        "param": None,
        "code": 503,
    }


async def test_with_an_engine_answers_pass_unchanged(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    engine.go_on.set()
    assert (await http.get("/whole")).json() == {"text": "ok"}
    assert (await http.get("/stream")).text.endswith("data: [DONE]\n\n")
    assert (await http.get("/broken")).json() == {"error": {"code": 500}}, "its engine lives"
    assert upstream.cut_total == 0


async def test_a_call_whose_engine_dies_gets_503_where_the_application_says_500(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    call = await begun(engine, http.get("/whole"))
    engine.die()
    assert is_refusal(await call, AWAY)
    assert upstream.cut_total == 1


async def test_a_stream_whose_engine_dies_ends_in_one_error_event(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    call = await begun(engine, http.get("/stream"))
    engine.die()
    text = (await call).text
    assert text == 'data: {"text": "a"}\n\n' + AWAY.last_events().decode()
    assert text.count('"error"') == 1


async def test_open_calls_are_cut_when_their_engine_is_taken_away(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    whole = await begun(engine, http.get("/whole"))
    engine.began.clear()
    stream = await begun(engine, http.get("/stream"))
    upstream.take_away()
    assert is_refusal(await whole, CUT)
    assert engine.cancelled, "the call went on in the engine"
    assert (await stream).text.endswith(CUT.last_events().decode())
    assert upstream.cut_total == 2
    assert is_refusal(await http.get("/whole"), AWAY), "new calls reach no engine that is gone"


async def test_the_next_engine_gets_the_next_calls(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    upstream.take_away()
    second = Engine()
    second.go_on.set()
    upstream.serving = second
    assert (await http.get("/whole")).json() == {"text": "ok"}
    assert not engine.began.is_set()


async def test_a_mistake_in_the_application_is_not_hidden(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    async def mistaken(*_: Any) -> None:
        raise LookupError("a mistake")

    upstream.serving = SimpleNamespace(app=mistaken, is_alive=lambda: True)
    with pytest.raises(LookupError, match="a mistake"):
        await http.get("/whole")


async def test_a_client_that_goes_away_ends_its_call(upstream: Edge, engine: Engine) -> None:
    upstream.serving = engine

    async def nothing(*_: Any) -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/whole", "headers": [], "query_string": b""}
    call = await begun(engine, upstream(scope, nothing, nothing))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert engine.cancelled
