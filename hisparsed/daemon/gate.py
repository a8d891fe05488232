"""The gate in front of the OpenAI API: drain, session limits, and the common metrics page.

An ASGI middleware. It reads the whole body of a generating call before anything else sees it,
tells the session by the ``x-hisparsed-session`` header or else by what the prompt begins
with, and changes nothing. Counts open requests, so a drain knows when it is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparsed.daemon.prompt_prefix import prompt_marks
from hisparsed.daemon.session_door import Entry, SessionDoor

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION_HEADER = b"x-hisparsed-session"
MAX_BODY_BYTES = 64 * 2**20
"""Larger bodies are refused: a million tokens of text are a tenth of it."""
_GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/inference/v1/generate",
    "/generative_scoring",
    # Where SageMaker sends any of the calls above.
    "/invocations",
)
_DRAIN_RETRY_S = 5


@dataclass
class GateCounters:
    """Cumulative, for the metrics page."""

    refused_draining: int = 0
    refused_session: int = 0
    refused_size: int = 0


class Gate:
    """Wraps the OpenAI application; ``door`` says which calls may start."""

    def __init__(self, app: App, *, door: SessionDoor, metrics_page: Callable[[], bytes]) -> None:
        self._app = app
        self._metrics_page = metrics_page
        self.door = door
        self.counters = GateCounters()
        self.open_requests = 0
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """From now on calls are refused; those that are open go on, those held back do not."""
        self._draining = True
        self.door.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path == "/metrics":
            await _answer(send, 200, self._metrics_page(), b"text/plain; version=0.0.4")
            return
        if not path.startswith(_GENERATING) or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._draining:
            await self._refuse_draining(send)
            return
        body = await self._body(receive, send)
        if body is None:
            return
        # From here on it is a call: a client that never sends all of it holds up no drain.
        self.open_requests += 1
        try:
            await self._call(scope, body, receive, send)
        finally:
            self.open_requests -= 1

    async def _body(self, receive: Receive, send: Send) -> bytes | None:
        """All of it, or ``None`` when the client went away or was refused."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                self.counters.refused_size += 1
                text = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; send a shorter prompt"
                await _refuse(send, 413, "request_too_large", text)
                return None
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def _call(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        header = dict(scope["headers"]).get(SESSION_HEADER)
        marks = (b"header:" + header,) if header else prompt_marks(body)
        call_id, entry = self.door.enter(marks)
        hang_up = asyncio.ensure_future(receive())
        try:
            waiting: set[asyncio.Future[Any]] = {entry, hang_up}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not entry.done():
                return
            if entry.result() is Entry.ADMITTED:
                await self._app(scope, _replay(body, hang_up, receive), send)
            elif entry.result() is Entry.CLOSED:
                await self._refuse_draining(send)
            else:
                await self._refuse_session(send)
        finally:
            hang_up.cancel()
            self.door.leave(call_id, marks)

    async def _refuse_draining(self, send: Send) -> None:
        self.counters.refused_draining += 1
        text = "this node is stopping; retry elsewhere"
        await _refuse(send, 503, "node_draining", text, _DRAIN_RETRY_S)

    async def _refuse_session(self, send: Send) -> None:
        self.counters.refused_session += 1
        text = "no new sessions while earlier calls wait; retry after the time given"
        await _refuse(send, 429, "node_oversubscribed", text, self.door.limit.retry_after_s)


def _replay(body: bytes, hang_up: asyncio.Future[Message], receive: Receive) -> Receive:
    """The body once, then what comes after it."""
    calls = 0

    async def replay() -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            return {"type": "http.request", "body": body, "more_body": False}
        return await hang_up if calls == 2 else await receive()

    return replay


async def _refuse(
    send: Send, status: int, kind: str, message: str, retry_after_s: float | None = None
) -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    headers: list[tuple[bytes, bytes]] = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    await _answer(send, status, body, b"application/json", headers)


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})
