"""The gate in front of the OpenAI API: drain, session limits, and the common metrics page.

An ASGI middleware; it neither keeps nor changes bodies. Counts requests that have arrived and
are open, so a drain knows when it is done. Sessions are told by the ``x-hisparsed-session``
header here; the engine tells them by prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION_HEADER = b"x-hisparsed-session"
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True)
class SessionLimit:
    """New sessions are refused while ``max_waiting`` calls wait; ``None`` admits all.

    Zero refuses them as soon as any call waits: where nothing waits, nobody is refused.
    """

    max_waiting: int | None = None
    retry_after_s: float = 1.0


@dataclass
class GateCounters:
    """Cumulative, for the metrics page."""

    refused_draining: int = 0
    refused_session: int = 0


class Gate:
    """Wraps the OpenAI application. ``clock`` is monotonic seconds."""

    def __init__(
        self,
        app: App,
        *,
        clock: Callable[[], float],
        waiting_calls: Callable[[], int],
        metrics_page: Callable[[], bytes],
        session_ttl_s: float = 300.0,
    ) -> None:
        self._app = app
        self._clock = clock
        self._waiting_calls = waiting_calls
        self._metrics_page = metrics_page
        self._session_ttl_s = session_ttl_s
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        self.limit = SessionLimit()
        self.counters = GateCounters()
        self.draining = False
        self.open_requests = 0

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
        if self.draining:
            self.counters.refused_draining += 1
            await _refuse(send, 503, "node_draining", "this node is stopping; retry elsewhere", 5)
            return
        if not self._admits(dict(scope["headers"]).get(SESSION_HEADER)):
            self.counters.refused_session += 1
            await _refuse(
                send,
                429,
                "node_oversubscribed",
                "no new sessions while earlier calls wait; retry after the time given",
                self.limit.retry_after_s,
            )
            return
        arrived = False

        async def receive_and_count() -> Message:
            nonlocal arrived
            message = await receive()
            # From here on it is a call: a client that never sends all of it holds up no drain.
            if not arrived and message["type"] == "http.request" and not message.get("more_body"):
                arrived = True
                self.open_requests += 1
            return message

        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self.open_requests -= arrived

    def _admits(self, session: bytes | None) -> bool:
        now = self._clock()
        while self._sessions:
            oldest = next(iter(self._sessions))
            if self._sessions[oldest] + self._session_ttl_s > now:
                break
            del self._sessions[oldest]
        known = session is not None and session in self._sessions
        limit = self.limit.max_waiting
        waiting = self._waiting_calls() if limit is not None and not known else 0
        if limit is not None and waiting and waiting >= limit:
            return False
        if session is not None:
            self._sessions[session] = now
            self._sessions.move_to_end(session)
        return True


async def _refuse(send: Send, status: int, kind: str, message: str, retry_after_s: float) -> None:
    body = f'{{"error":{{"message":"{message}","type":"{kind}","code":{status}}}}}'.encode()
    retry_after = str(max(1, round(retry_after_s))).encode()
    await _answer(send, status, body, b"application/json", [(b"retry-after", retry_after)])


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
