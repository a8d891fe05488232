"""Each API's clients get errors in the form of their API, whole or at the end of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.node.openai.admission import STOPPING, Admission
from hisparsed.node.openai.background import BackgroundResponses
from hisparsed.node.openai.errors import (
    BegunResponse,
    ErrorForm,
    Refusal,
    as_anthropic_error,
    form_of,
)
from hisparsed.node.openai.server import openai_app
from hisparsed.node.openai.session_limit import Queue, SessionLimit, SessionLimiter
from hisparsed.node.openai.upstream import Upstream

AWAY = Refusal(503, "engine_unavailable", "the engine is restarting", 7.0)
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.0,
    "model": "m",
    "status": "in_progress",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
BEGUN: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [
        {"type": "ping"},
    ],
    RESPONSES: [
        {"type": "response.created", "sequence_number": 0, "response": RESPONSE},
        {"type": "response.in_progress", "sequence_number": 1, "response": RESPONSE},
    ],
}
VLLM_SAYS: dict[str, Callable[[], bytes] | None] = {
    MESSAGES: lambda: b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n',
    RESPONSES: None,
}
"""What vLLM's application makes of its engine's death in a stream; ``None``: an exception."""


def event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


class Node:
    """Everything in front of an application whose streams begin, and end with their engine."""

    def __init__(self) -> None:
        self.alive = True
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        app = Starlette(
            routes=[Route(path, self.answer, methods=["POST"]) for path in (MESSAGES, RESPONSES)]
        )
        engine = SimpleNamespace(app=app, is_alive=lambda: self.alive)
        self.upstream = Upstream(lambda: engine, lambda: AWAY)
        self.refusal: Refusal | None = None
        self.sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 1, 0))
        self.admission = Admission(
            self.upstream,
            sessions=self.sessions,
            metrics_page=PlainTextResponse(),
            refusal=lambda: self.refusal,
        )
        self.keys: tuple[str, ...] = ()

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=openai_app(self.admission, api_keys=self.keys))
        return httpx.AsyncClient(transport=transport, base_url="http://node")

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url="http://node/v1", api_key="wrong", max_retries=0, http_client=self.http()
        )

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        body = await request.json()
        if not body.get("stream"):  # as vLLM's own check of the fields, on every path
            error = {"message": "max_tokens is missing", "type": "Bad Request", "code": 400}
            return JSONResponse({"error": error}, 400)

        async def events() -> AsyncIterator[bytes]:
            for content in BEGUN[path]:
                yield event(content)
            self.began.set()
            await self.go_on.wait()
            says = VLLM_SAYS[path]
            if says is None:
                raise RuntimeError("the engine is dead")
            yield says()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def die(self) -> None:
        await self.began.wait()
        self.alive = False
        self.go_on.set()

    async def cut(self) -> None:
        await self.began.wait()
        self.upstream.cut(AWAY, BackgroundResponses(None))


@pytest.fixture
async def node() -> Node:
    return Node()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/messages", ErrorForm.ANTHROPIC),
        ("/v1/messages/count_tokens", ErrorForm.ANTHROPIC),
        ("/v1/responses", ErrorForm.RESPONSES),
        ("/v1/responses/resp_1", ErrorForm.RESPONSES),
        ("/v1/messagesx", ErrorForm.OPENAI),
        (CHAT, ErrorForm.OPENAI),
    ],
)
def test_the_path_tells_the_form(path: str, form: ErrorForm) -> None:
    assert form_of(path) is form


@pytest.mark.parametrize("end", [Node.die, Node.cut])
async def test_a_stream_of_messages_ends_as_anthropics_clients_expect(node: Node, end: Any) -> None:
    ending = asyncio.create_task(end(node))
    text = (await node.http().post(MESSAGES, json={"stream": True})).text
    await ending
    *_, last, nothing = text.split("\n\n")
    name, data = last.split("\n")
    assert (name, nothing) == ("event: error", "")
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": AWAY.message},
    }


@pytest.mark.parametrize("end", [Node.die, Node.cut])
async def test_a_stream_of_responses_ends_with_the_answer_failed(node: Node, end: Any) -> None:
    ending = asyncio.create_task(end(node))
    stream = await node.openai().responses.create(model="m", input="a", stream=True)
    events = [one async for one in stream]
    await ending
    last = events[-1]
    assert isinstance(last, ResponseFailedEvent)
    assert last.sequence_number == 2
    assert (last.response.id, last.response.status) == ("resp_1", "failed")
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", AWAY.message)
    assert [one.type for one in events].count("response.failed") == 1


@pytest.mark.parametrize("end", [Node.die, Node.cut])
async def test_neither_stream_has_anything_of_openais_first_form(node: Node, end: Any) -> None:
    for path in (MESSAGES, RESPONSES):
        again = Node()
        ending = asyncio.create_task(end(again))
        text = (await again.http().post(path, json={"stream": True})).text
        await ending
        assert "[DONE]" not in text
        assert "internal_error" not in text


def test_a_response_that_was_never_begun_ends_with_an_error_event() -> None:
    begun = BegunResponse()
    begun.saw(b": a comment\n\n")
    name, data = begun.failed("engine_unavailable", "gone").decode().strip().split("\n")
    assert name == "event: error"
    last = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "))
    assert (last.code, last.message, last.sequence_number) == ("engine_unavailable", "gone", 1)


async def test_the_application_that_breaks_while_its_engine_lives_is_not_hidden(
    node: Node,
) -> None:
    node.go_on.set()
    with pytest.raises(RuntimeError, match="the engine is dead"):
        await node.http().post(RESPONSES, json={"stream": True})


async def test_refusals_of_the_node_reach_anthropics_clients_as_its_own(node: Node) -> None:
    async def refused(**call: Any) -> tuple[int, str]:
        answer = await node.http().post(MESSAGES, content=json.dumps(call))
        body = answer.json()
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
        return answer.status_code, body["error"]["type"]

    assert await refused(n=5_000) == (400, "invalid_request_error")
    assert await refused(stop="\ud800") == (400, "invalid_request_error")
    node.sessions.limit = SessionLimit(max_waiting=0)
    assert await refused() == (429, "rate_limit_error")
    node.refusal = STOPPING
    assert await refused() == (503, "overloaded_error")
    node.keys = ("right",)
    assert await refused() == (401, "authentication_error")


async def test_what_vllm_refuses_before_its_messages_api_is_put_into_its_form(node: Node) -> None:
    answer = await node.http().post(MESSAGES, json={})
    assert (answer.status_code, answer.json()) == (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "max_tokens is missing"},
        },
    )
    other = await node.http().post(RESPONSES, json={})
    assert other.json()["error"]["type"] == "Bad Request", "OpenAI's form is right there"


@pytest.mark.parametrize("body", [b"", b"Not Found", b"[1]", b'{"error": 5}', b'{"detail": [1]}'])
def test_an_error_of_an_unknown_form_stays_as_it_is(body: bytes) -> None:
    assert as_anthropic_error(404, body) == body


def test_fastapis_own_error_is_told_too() -> None:
    error = json.loads(as_anthropic_error(404, b'{"detail": "Not Found"}'))["error"]
    assert error == {"type": "not_found_error", "message": "Not Found"}
