"""The answers that clients get while there is no engine, when their engine dies, and when their
time has ended."""

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

from hisparsed.node.openai.background import BackgroundResponses
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.upstream import How, Upstream

AWAY = Refusal(503, "engine_unavailable", "the engine is restarting", 7.0)
CUT = Refusal(503, "engine_unavailable", "your time is over", 3.0)
WHOLE, STREAM, BROKEN = (f"/v1/completions/{name}" for name in ("whole", "stream", "broken"))
RESPONSE = "/v1/responses/resp_1"


class Engine:
    """An application like vLLM's, whose engine can die."""

    def __init__(self) -> None:
        self.alive = True
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = False
        self.background = BackgroundResponses(None)
        self.app = Starlette(
            routes=[
                Route(WHOLE, self.whole, methods=["POST"]),
                Route(STREAM, self.stream, methods=["POST"]),
                Route(BROKEN, self.broken, methods=["POST"]),
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
        self.serving, engine = None, self.serving
        self.cut(CUT, engine.background)


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
    response = await http.post(WHOLE)
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
    assert (await http.post(WHOLE)).json() == {"text": "ok"}
    assert (await http.post(STREAM)).text.endswith("data: [DONE]\n\n")
    assert (await http.post(BROKEN)).json() == {"error": {"code": 500}}, "its engine lives"
    assert upstream.ended == {How.ANSWERED: 2, How.FAILED: 1}


async def test_a_call_whose_engine_dies_gets_503_where_the_application_says_500(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    call = await begun(engine, http.post(WHOLE))
    engine.die()
    assert is_refusal(await call, AWAY)
    assert upstream.ended == {How.CUT: 1}


async def test_a_stream_whose_engine_dies_ends_in_one_error_event(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    call = await begun(engine, http.post(STREAM))
    engine.die()
    text = (await call).text
    assert text == 'data: {"text": "a"}\n\n' + AWAY.last_events().decode()
    assert text.count('"error"') == 1


async def test_open_calls_are_cut_when_their_engine_is_taken_away(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    whole = await begun(engine, http.post(WHOLE))
    engine.began.clear()
    stream = await begun(engine, http.post(STREAM))
    upstream.take_away()
    assert is_refusal(await whole, CUT)
    assert engine.cancelled, "the call went on in the engine"
    assert (await stream).text.endswith(CUT.last_events().decode())
    assert upstream.ended == {How.CUT: 2}
    assert is_refusal(await http.post(WHOLE), AWAY), "new calls reach no engine that is gone"


async def test_the_next_engine_gets_the_next_calls(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    upstream.serving = engine
    upstream.take_away()
    second = Engine()
    second.go_on.set()
    upstream.serving = second
    assert (await http.post(WHOLE)).json() == {"text": "ok"}
    assert not engine.began.is_set()


async def test_a_mistake_in_the_application_is_not_hidden(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    async def mistaken(*_: Any) -> None:
        raise LookupError("a mistake")

    upstream.serving = SimpleNamespace(app=mistaken, is_alive=lambda: True)
    assert upstream.ended == {}
    with pytest.raises(LookupError, match="a mistake"):
        await http.post(WHOLE)
    assert upstream.ended == {How.FAILED: 1}


async def test_a_client_that_goes_away_ends_its_call(upstream: Edge, engine: Engine) -> None:
    upstream.serving = engine

    async def nothing(*_: Any) -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "POST", "path": WHOLE, "headers": [], "query_string": b""}
    call = await begun(engine, upstream(scope, nothing, nothing))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert engine.cancelled
    assert upstream.ended == {How.CANCELLED: 1}


async def test_a_client_that_hangs_up_is_told_from_one_that_is_cut(
    upstream: Edge, engine: Engine
) -> None:
    async def waits(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        await JSONResponse(None)(scope, receive, send)

    async def hang_up() -> Any:
        return {"type": "http.disconnect"}

    async def nothing(_: Any) -> None: ...

    upstream.serving = SimpleNamespace(app=waits, is_alive=lambda: True)
    scope = {"type": "http", "method": "POST", "path": WHOLE, "headers": [], "query_string": b""}
    await upstream(scope, hang_up, nothing)
    assert upstream.ended == {How.CANCELLED: 1}


class Response1:
    """As vLLM keeps one."""

    status = "in_progress"

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"id": "resp_1", "status": self.status, "error": None}


async def test_a_response_in_the_background_that_is_followed_is_one_call(
    upstream: Edge, engine: Engine
) -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    api = SimpleNamespace(background_tasks={"resp_1": task}, response_store={})
    event = {"type": "response.created", "response": {"id": "resp_1"}}

    async def follows(scope: Any, receive: Any, send: Any) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield f"event: response.created\ndata: {json.dumps(event)}\n\n".encode()
            engine.began.set()
            await engine.go_on.wait()

        await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)

    upstream.serving = SimpleNamespace(
        app=follows, is_alive=lambda: True, background=BackgroundResponses(api)
    )
    assert list(upstream.background()) == [task], "its client is gone"
    transport = httpx.ASGITransport(app=upstream)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        call = await begun(engine, http.post("/v1/responses", json={"stream": True}))
        assert not upstream.background()
        engine.go_on.set()
        await call
    assert list(upstream.background()) == [task], "it was followed to its end by nobody"
    task.cancel()


async def test_a_response_in_the_background_is_open_until_it_is_answered_and_fails_when_cut(
    upstream: Edge, engine: Engine, http: httpx.AsyncClient
) -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    done = Response1()
    done.status = "completed"
    api = SimpleNamespace(
        background_tasks={"resp_1": task},
        response_store={"resp_1": Response1(), "resp_0": done},
    )
    engine.background = BackgroundResponses(api)
    upstream.serving = engine
    assert engine.background.tasks() == {"resp_1": task}
    upstream.take_away()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not engine.background.tasks()
    assert upstream.ended == {How.CUT: 1}, "one was answered"
    found = (await http.get(RESPONSE)).json()
    assert (found["status"], found["error"]["message"]) == ("failed", CUT.message)
    streamed = (await http.get(RESPONSE, params={"stream": "true"})).text
    assert streamed.startswith("event: response.failed\n")
    answered = (await http.get("/v1/responses/resp_0")).json()
    assert (answered["status"], answered["error"]) == ("completed", None)
    assert (await http.get("/v1/responses/resp_2")).status_code == 503
