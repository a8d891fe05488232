"""Admission of calls to the OpenAI API: drain, limits on bodies and sessions, open requests.

An ASGI middleware. It reads every body whole, within bounds, before anything else sees it, and
identifies the session of a generating call by a header or else by the beginning of the prompt. It
changes nothing. It counts open requests, so that a drain knows when it is done, serves the common
metrics page, and makes vLLM's health page report what the node knows of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any

from hisparsed.engine.context_limit import ContextLimit
from hisparsed.node.openai.errors import Message, Refusal, Send, form_of, refuse
from hisparsed.node.openai.request_body import (
    MAX_ANSWERS,
    answers_asked,
    least_tokens,
    lone_surrogate,
    prompt_marks,
)
from hisparsed.node.openai.session_limit import Entry, SessionLimit, SessionLimiter
from hisparsed.node.openai.upstream import generates
from hisparsed.policy import signals

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION_HEADERS = (b"x-hisparsed-session", b"x-session-id", b"x-claude-code-session-id")
"""The first of them that a call has identifies its session; routers hash the last two."""
MAX_BODY_BYTES = 64 * 2**20
"""Larger bodies are refused: a million tokens of text are a tenth of it."""
_HEALTH = ("/health", "/ping")
_ASK_AGAIN_S = 5.0
STOPPING = Refusal(503, "node_draining", "this node is stopping; retry elsewhere", 5.0)


@dataclass
class AdmissionCounters:
    """Cumulative, for the metrics page."""

    refused_draining: int = 0
    refused_session: int = 0
    refused_size: int = 0
    refused_answers: int = 0
    refused_engine: int = 0
    """There was no engine, or it was about to be restarted."""
    cancelled: int = 0
    """Their client went away while they were held back."""


class Admission:
    """Wraps the OpenAI application; ``sessions`` says which calls may start."""

    def __init__(
        self,
        app: App,
        *,
        sessions: SessionLimiter,
        metrics_page: App,
        context: ContextLimit | None = None,
        refusal: Callable[[], Refusal | None] = lambda: None,
        unready: Callable[[], str | None] = lambda: None,
        background: Callable[[], Collection[asyncio.Future[Any]]] = tuple,
    ) -> None:
        """``refusal`` gives the answer while no call can start, ``unready`` the reason while the
        node should get none, ``background`` the calls that run after their first answer."""
        self._app = app
        self._refusal = refusal
        self._unready = unready
        self._background = background
        self._context = context if context is not None else ContextLimit()
        self._metrics_page = metrics_page
        self.sessions = sessions
        self.counters = AdmissionCounters()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """Calls that are not answered yet, those in the background too."""
        return self._open + len(self._background())

    def release_held(self) -> None:
        """Calls that are held back end with the refusal; those that are open continue."""
        self.sessions.close()

    def put_limits(self, limits: signals.AdmissionRules) -> None:
        """Apply the policy's limits."""
        self.sessions.limit = SessionLimit(
            max_waiting=limits.max_waiting_sessions,
            retry_after_s=limits.retry_after_s,
            when_full=limits.when_full,
            max_wait_s=limits.max_wait_s,
        )
        self._context.max_tokens = limits.max_context_tokens
        self._context.over = limits.over_max_context

    def refused_by_limits(self) -> int:
        """Calls that the policy's limits refused so far."""
        return self.counters.refused_session + self._context.refused

    async def all_ended(self, within_s: float) -> bool:
        """Whether no call is open, at once or within this many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.open_requests:
                    await self._idle.wait()
                    if background := self._background():
                        await asyncio.wait(background)
        return not self.open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path == "/metrics":
            await self._metrics_page(scope, receive, send)
            return
        if path in _HEALTH and (unhealthy := self._unhealthy()) is not None:
            await refuse(send, unhealthy)
            return
        is_call = generates(scope)
        if is_call and (refusal := self._refusal()) is not None:
            await self._refuse(send, path, refusal)
            return
        body = await self._body(scope, receive, send)
        if body is None:
            return
        if not is_call:
            await self._app(scope, _replay(body, receive), send)
            return
        if (refusal := self._refusal()) is not None:
            await self._refuse(send, path, refusal)
            return
        # From here on it is a call. Before, a client that never sends the whole body does not delay
        # a drain.
        self._open += 1
        self._idle.clear()
        try:
            await self._call(scope, body, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _unhealthy(self) -> Refusal | None:
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        reason = self._unready()
        return Refusal(503, "node_not_ready", reason, _ASK_AGAIN_S) if reason else None

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """The whole body, or ``None`` when the client disconnected or was refused.

        For every path, since vLLM's application takes bodies of any size.
        """
        parts: list[bytes] = []
        size = 0
        if _declared_bytes(scope) > MAX_BODY_BYTES:
            await self._refuse_size(send, scope)
            return None
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                await self._refuse_size(send, scope)
                return None
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def _refuse_size(self, send: Send, scope: Scope) -> None:
        self.counters.refused_size += 1
        text = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
        longest = self._context.in_force
        if longest is not None and generates(scope):
            # Agents shorten their prompt when they recognise these words.
            text = ContextLimit.overflow(longest, text)
        await refuse(send, Refusal(413, "request_too_large", text), form_of(scope["path"]))

    def _too_long(self, body: bytes) -> str | None:
        limit = self._context
        longest = limit.in_force
        # A token is at least one character, or a number and a comma, so most bodies need no check.
        if longest is None or len(body) < longest:
            return None
        return limit.refuses(least_tokens(body, chars_per_token=limit.chars_per_token))

    def _fault(self, body: bytes) -> Refusal | None:
        """Why a call is refused because of its content."""
        too_long = self._too_long(body)
        if too_long is not None:
            return Refusal(400, "BadRequestError", too_long, param="input_tokens")
        fault = lone_surrogate(body) or self._too_many(body)
        return Refusal(400, "BadRequestError", fault) if fault is not None else None

    def _too_many(self, body: bytes) -> str | None:
        answers = answers_asked(body)
        if answers <= MAX_ANSWERS:
            return None
        self.counters.refused_answers += 1
        return (
            f"the call asks for {answers} answers (prompts times n), and {MAX_ANSWERS} are the "
            "most; send several"
        )

    async def _call(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path = scope["path"]
        fault = self._fault(body)
        if fault is not None:
            await refuse(send, fault, form_of(path))
            return
        headers = dict(scope["headers"])
        header = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
        marks = (b"header:" + header,) if header else prompt_marks(body)
        call_id, entry = self.sessions.enter(marks)
        hang_up = asyncio.ensure_future(receive())
        try:
            waiting: set[asyncio.Future[Any]] = {entry, hang_up}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not entry.done():
                self.counters.cancelled += 1
                return
            if entry.result() is Entry.ADMITTED:
                await self._app(scope, _replay(body, receive, hang_up), send)
            elif entry.result() is Entry.CLOSED:
                await self._refuse(send, path, self._refusal() or STOPPING)
            else:
                await self._refuse_session(send, path)
        finally:
            hang_up.cancel()
            self.sessions.leave(call_id, marks)

    async def _refuse(self, send: Send, path: str, refusal: Refusal) -> None:
        if refusal.kind == STOPPING.kind:
            self.counters.refused_draining += 1
        else:
            self.counters.refused_engine += 1
        await refuse(send, refusal, form_of(path))

    async def _refuse_session(self, send: Send, path: str) -> None:
        self.counters.refused_session += 1
        text = "no new sessions while earlier calls wait; retry after the time given"
        retry_after_s = self.sessions.limit.retry_after_s
        refusal = Refusal(429, "node_oversubscribed", text, retry_after_s)
        await refuse(send, refusal, form_of(path))


def _declared_bytes(scope: Scope) -> int:
    """The body's length from the headers; 0 if they have none, as for chunked bodies."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


def _replay(
    body: bytes, receive: Receive, hang_up: asyncio.Future[Message] | None = None
) -> Receive:
    """The body once, then later messages: first the one that ``hang_up`` waits for."""
    calls = 0

    async def replay() -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            return {"type": "http.request", "body": body, "more_body": False}
        return await (hang_up if calls == 2 and hang_up is not None else receive())

    return replay
