"""Admission: drain, session limits, metrics; and that it counts what is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from hisparsed.engine.context_limit import ContextLimit
from hisparsed.node.openai.admission import MAX_BODY_BYTES, STOPPING, Admission
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.request_body import MAX_ANSWERS
from hisparsed.node.openai.session_limit import Entry, Queue, SessionLimit, SessionLimiter


class Node:
    """An admission around an application whose completions end when the test ends them."""

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
                Route("/health", models),
                Route("/ping", models),
            ]
        )
        self.reports = 0
        self.sessions = SessionLimiter(
            clock=lambda: self.now_s, queue=self.report, look_every_s=0.0
        )
        self.refusal: Refusal | None = None
        self.unready: str | None = None
        self.admission = Admission(
            app,
            sessions=self.sessions,
            metrics_page=PlainTextResponse("hisparsed_up 1\n"),
            refusal=lambda: self.refusal,
            unready=lambda: self.unready,
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.admission), base_url="http://node"
        )

    def drain(self) -> None:
        self.refusal = STOPPING
        self.admission.release_held()

    def report(self) -> Queue:
        self.reports += 1
        return Queue(self.reports, self.waiting, room=0 if self.waiting else 8)

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
    await until(lambda: node.admission.open_requests == 1)
    node.go_on.set()
    assert (await call).json() == {"text": "ok"}
    assert node.admission.open_requests == 0


async def test_a_request_is_not_open_before_all_of_it_arrived(node: Node) -> None:
    parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    open_when_answered: list[int] = []

    async def send(_: Any) -> None:
        open_when_answered.append(node.admission.open_requests)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    call = asyncio.create_task(node.admission(scope, parts.get, send))
    parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await until(parts.empty)
    assert node.admission.open_requests == 0
    parts.put_nowait({"type": "http.request", "body": b"}", "more_body": False})
    await call
    assert set(open_when_answered) == {1}
    assert node.admission.open_requests == 0


async def test_a_draining_node_refuses_new_calls_and_finishes_open_ones(node: Node) -> None:
    node.go_on.clear()
    call = asyncio.create_task(node.call())
    await until(lambda: node.admission.open_requests == 1)
    node.drain()
    refused = await node.call()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["type"] == "node_draining"
    assert (await node.client.get("/v1/models")).status_code == 200
    node.go_on.set()
    assert (await call).status_code == 200
    assert node.admission.counters.refused_draining == 1


async def test_new_sessions_get_429_while_calls_wait_and_known_ones_pass(node: Node) -> None:
    assert (await node.call("known")).status_code == 200
    node.sessions.limit = SessionLimit(max_waiting=2, retry_after_s=7.4)
    node.waiting = 2
    assert (await node.call("known")).status_code == 200
    refused = await node.call("new")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert (await node.call()).status_code == 429, "a call without a session counts as new"
    node.waiting = 1
    assert (await node.call("new")).status_code == 200
    assert node.admission.counters.refused_session == 2


@pytest.mark.parametrize(
    "name", ["x-hisparsed-session", "x-session-id", "x-claude-code-session-id"]
)
async def test_a_session_is_told_by_the_headers_of_routers_and_agents(
    node: Node, name: str
) -> None:
    async def call(session: str) -> int:
        answer = await node.client.post("/v1/completions", json={}, headers={name: session})
        return answer.status_code

    assert await call("known") == 200
    node.sessions.limit = SessionLimit(max_waiting=0)
    node.waiting = 1
    assert (await call("known"), await call("new")) == (200, 429)


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_the_health_page_says_what_keeps_calls_away(node: Node, path: str) -> None:
    assert (await node.client.get(path)).status_code == 200
    node.unready = "calls have stood still for 40s"
    answer = await node.client.get(path)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, node.unready)
    assert answer.headers["retry-after"] == "5"
    assert (await node.call()).status_code == 200, "only routers are told"
    node.unready = None
    node.drain()
    assert (await node.client.get(path)).json()["error"]["type"] == "node_draining"


async def test_nobody_is_refused_where_nothing_waits(node: Node) -> None:
    node.sessions.limit = SessionLimit(max_waiting=0)
    assert (await node.call("new")).status_code == 200
    node.waiting = 1
    assert (await node.call("other")).status_code == 429


async def test_sessions_are_forgotten_after_their_time(node: Node) -> None:
    await node.call("old")
    node.sessions.limit = SessionLimit(max_waiting=0)
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

    sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
    admission = Admission(broken, sessions=sessions, metrics_page=PlainTextResponse())
    transport = httpx.ASGITransport(app=admission, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        assert (await client.post("/v1/completions", json={})).status_code == 500
    assert admission.open_requests == 0


async def test_held_calls_are_refused_when_they_cannot_be_judged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = [Queue(0, 1, 0)]  # the second look finds none: an IndexError
    sessions = SessionLimiter(clock=lambda: 0.0, queue=reports.pop, look_every_s=0.0)
    sessions.limit = SessionLimit(max_waiting=0, when_full="wait")
    _, entry = sessions.enter([b"new"])
    assert sessions.held == 1
    assert await asyncio.wait_for(entry, 5) is Entry.REFUSED
    assert sessions.held == 0
    assert "IndexError" in caplog.text


def chat(*texts: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return {
        "model": "m",
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ],
    }


async def test_a_session_is_known_by_what_its_prompt_begins_with(node: Node) -> None:
    async def post(call: dict[str, Any]) -> int:
        return (await node.client.post("/v1/completions", json=call)).status_code

    assert await post(chat("be brief", "hello")) == 200
    node.sessions.limit = SessionLimit(max_waiting=0)
    node.waiting = 1
    assert await post(chat("be brief", "hello", "hi", "go on")) == 200
    assert await post(chat("be brief", "another")) == 429, "a common system prompt is no session"
    assert await post(chat("be brief", "hello", "hi", "go on", "so", "more")) == 200


async def test_where_the_policy_says_wait_a_new_session_starts_when_the_queue_is_gone(
    node: Node,
) -> None:
    node.sessions.limit = SessionLimit(max_waiting=0, when_full="wait", max_wait_s=60.0)
    node.waiting = 1
    call = asyncio.create_task(node.call("new"))
    await until(lambda: node.sessions.held == 1)
    assert not call.done()
    node.waiting = 0
    assert (await call).status_code == 200
    assert (node.sessions.held, node.sessions.held_total) == (0, 1)


async def test_who_waited_the_longest_allowed_time_gets_429(node: Node) -> None:
    node.sessions.limit = SessionLimit(max_waiting=0, when_full="wait", max_wait_s=60.0)
    node.waiting = 1
    call = asyncio.create_task(node.call("new"))
    await until(lambda: node.sessions.held == 1)
    node.now_s = 60.0
    assert (await call).status_code == 429


async def test_a_client_that_hangs_up_is_no_longer_held(node: Node) -> None:
    node.sessions.limit = SessionLimit(max_waiting=0, when_full="wait")
    node.waiting = 1
    parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    parts.put_nowait({"type": "http.request", "body": b"{}"})
    call = asyncio.create_task(node.admission(scope, parts.get, send))
    await until(lambda: node.sessions.held == 1)
    parts.put_nowait({"type": "http.disconnect"})
    await call
    assert (node.sessions.held, node.admission.open_requests, answers) == (0, 0, [])


async def test_a_node_that_stops_holds_nobody_back(node: Node) -> None:
    node.sessions.limit = SessionLimit(max_waiting=0, when_full="wait")
    node.waiting = 1
    call = asyncio.create_task(node.call("new"))
    await until(lambda: node.sessions.held == 1)
    node.drain()
    assert (await call).status_code == 503


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read_whole(node: Node) -> None:
    parts = iter([b"x" * (MAX_BODY_BYTES // 2)] * 4)
    taken = 0

    async def stream() -> Any:
        nonlocal taken
        for part in parts:
            taken += 1
            yield part

    answer = await node.client.post("/v1/completions", content=stream())
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"
    assert taken == 3
    assert node.admission.counters.refused_size == 1


async def test_a_call_for_more_answers_than_others_can_wait_for_is_refused(node: Node) -> None:
    most = {"prompt": ["a"] * 4, "n": MAX_ANSWERS // 4}
    assert (await node.client.post("/v1/completions", json=most)).status_code == 200
    more = {"prompt": ["a"] * 5, "n": MAX_ANSWERS // 4}
    answer = await node.client.post("/v1/completions", json=more)
    assert answer.status_code == 400
    assert "asks for 1280 answers" in answer.json()["error"]["message"]
    assert node.admission.counters.refused_answers == 1
    assert node.admission.open_requests == 0


@pytest.mark.parametrize("path", ["/invocations", "/inference/v1/generate", "/generative_scoring"])
async def test_a_drain_refuses_calls_by_whatever_path_vllm_serves_them(
    node: Node, path: str
) -> None:
    node.drain()
    assert (await node.client.post(path, json={})).status_code == 503


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("the application saw a call that cannot fit")

    context = ContextLimit()
    context.max_tokens, context.chars_per_token = 100, 4
    sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
    admission = Admission(app, sessions=sessions, metrics_page=PlainTextResponse(), context=context)
    transport = httpx.ASGITransport(app=admission)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        for prompt in ("x" * 400, list(range(100))):
            refused = await client.post("/v1/completions", json={"prompt": prompt})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert "maximum context length is 100 tokens" in error["message"]
            assert "at least 100 input tokens" in error["message"]
            assert error["param"] == "input_tokens"
    assert context.refused == 2
    assert admission.open_requests == 0


async def test_a_prompt_that_may_fit_or_may_wait_is_passed_on(node: Node) -> None:
    context = ContextLimit()
    node.admission._context = context
    call = {"prompt": "x" * 399}
    for context.max_tokens, context.chars_per_token, context.over in (
        (101, 4, "refuse"),
        (10, None, "refuse"),
        (10, 4, "wait"),
        (None, 4, "refuse"),
    ):
        assert (await node.client.post("/v1/completions", json=call)).status_code == 200
    assert context.refused == 0


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/v1/unheard-of"])
async def test_every_path_s_body_is_bounded(node: Node, path: str) -> None:
    answer = await node.client.post(path, content=b"x" * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


async def test_a_call_beyond_the_bound_is_told_the_models_limit(node: Node) -> None:
    context = ContextLimit()
    context.model_tokens = 900
    node.admission._context = context
    answer = await node.client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    message = answer.json()["error"]["message"]
    assert message.startswith("This model's maximum context length is 900 tokens. However, the ")


async def test_a_body_that_says_it_is_too_large_is_not_read(node: Node) -> None:
    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [length]}
    await node.admission(scope, receive, send)
    assert sent[0]["status"] == 413


async def test_half_of_a_character_is_refused_before_the_application_sees_it(node: Node) -> None:
    node.go_on.clear()
    refused = await node.client.post("/v1/completions", content=b'{"stop": ["\\ud800"]}')
    assert refused.status_code == 400
    assert "half of a character" in refused.json()["error"]["message"]
    assert node.admission.open_requests == 0
    node.go_on.set()
    whole = await node.client.post("/v1/completions", content=b'{"stop": ["\\ud83d\\ude00"]}')
    assert whole.status_code == 200
