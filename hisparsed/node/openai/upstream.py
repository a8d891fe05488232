"""Forwards calls to the application of the running engine, and answers while there is none.

An ASGI application that outlives engines. Open calls can be cut: their clients get an error in the
form of their API, never a connection that hangs. How each generating call ended is counted.
Admission decides which calls come here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from enum import StrEnum
from typing import Any, Final, Protocol

from hisparsed.node.openai.background import BackgroundResponses, KeptResponses
from hisparsed.node.openai.errors import (
    AnthropicErrors,
    BegunResponse,
    ErrorForm,
    Message,
    Refusal,
    Send,
    form_of,
    refuse,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_TRY_AGAIN_LATER = 1013
"""Close code of a WebSocket."""


GENERATING: Final = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/inference/v1/generate",
    "/generative_scoring",
    # The path to which SageMaker sends any of the calls above.
    "/invocations",
)


def generates(scope: Scope) -> bool:
    """Whether a request is a call for tokens."""
    return scope["method"] == "POST" and str(scope["path"]).startswith(GENERATING)


class How(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"
    """Complete, or refused by vLLM because of its content."""
    CANCELLED = "cancelled"
    """Its client disconnected before."""
    CUT = "cut"
    """Its engine ended, or an override expired."""
    FAILED = "failed"
    """vLLM answered with its own error."""


class Serving(Protocol):
    """An engine that takes calls; what ``app`` answers counts while it is alive."""

    @property
    def app(self) -> App: ...

    @property
    def background(self) -> BackgroundResponses: ...

    def is_alive(self) -> bool: ...


class Upstream:
    """``engine`` returns the one that serves now; ``away`` the answer while there is none, or after
    it died."""

    def __init__(self, engine: Callable[[], Serving | None], away: Callable[[], Refusal]) -> None:
        self._engine = engine
        self._away = away
        self._calls: set[_Call] = set()
        self._kept = KeptResponses()
        self.ended: Counter[How] = Counter()
        """Generating calls; of those in the background only the cut ones."""

    def background(self) -> Collection[asyncio.Task[Any]]:
        """Calls that run after their first answer; one that a client still follows as the stream
        that began it is an open call."""
        engine = self._engine()
        if engine is None:
            return ()
        tasks = engine.background.tasks()
        followed = {call.response_id for call in self._calls} if tasks else set()
        return [task for name, task in tasks.items() if name not in followed]

    def cut(self, refusal: Refusal, background: BackgroundResponses) -> None:
        """Open calls end with ``refusal``, and so do those in the background."""
        for call in self._calls:
            call.cut(refusal)
        found, cut = background.end(refusal)
        self._kept.keep(found)
        # A response that a client also follows as a stream is one call, counted there.
        self.ended[How.CUT] += len(cut - {call.response_id for call in self._calls})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine()
        if scope["type"] == "websocket":
            if engine is None:
                await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})
            else:
                await engine.app(scope, receive, send)
            return
        form = form_of(scope["path"])
        if await self._kept.answers(scope, send):
            return
        if engine is None:
            await refuse(send, self._away(), form)
            return
        call = _Call(receive, send, form, engine.is_alive)
        self._calls.add(call)
        try:
            await self._run(engine, call, scope)
        except Exception:
            call.failed = True
            raise
        finally:
            self._calls.discard(call)
            if generates(scope):
                self.ended[call.how()] += 1

    async def _run(self, engine: Serving, call: _Call, scope: Scope) -> None:
        running = asyncio.ensure_future(engine.app(scope, call.receive, call.send))
        ends: set[asyncio.Future[Any]] = {running, call.refusal}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.refusal.done() and not call.lost and not _broke(engine, running):
                await running
                return
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        if running.done() and not running.cancelled():
            running.exception()  # the error of a call whose engine has gone needs no report
        if not call.ended:
            await call.end(call.refusal.result() if call.refusal.done() else self._away())


def _broke(engine: Serving, running: asyncio.Future[Any]) -> bool:
    """The application raised the error of a dead engine, as vLLM's streams of responses do."""
    return not running.cancelled() and bool(running.exception()) and not engine.is_alive()


class _Call:
    """One open call, with what its client has received so far."""

    def __init__(
        self, receive: Receive, send: Send, form: ErrorForm, is_alive: Callable[[], bool]
    ) -> None:
        self._receive = receive
        self._send = AnthropicErrors(send) if form is ErrorForm.ANTHROPIC else send
        self._form = form
        self._is_alive = is_alive
        self._response = BegunResponse() if form is ErrorForm.RESPONSES else None
        self._begun = False
        self._streams = False
        self.failed = False
        self._left = False
        self._was_cut = False
        self.ended = False
        self.lost = False
        """The application answered with the death of its engine."""
        self.refusal: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()

    def cut(self, refusal: Refusal) -> None:
        if not self.refusal.done():
            self.refusal.set_result(refusal)

    @property
    def response_id(self) -> str | None:
        """Of a stream of the Responses API, once it has begun."""
        return self._response.id if self._response is not None else None

    def how(self) -> How:
        """Of a call that has ended."""
        if self._was_cut:
            return How.CUT
        if self._left:
            return How.CANCELLED
        if self.failed:
            return How.FAILED
        return How.ANSWERED if self.ended else How.CANCELLED

    async def receive(self) -> Message:
        """What the client sends; notes if it disconnects before its answer."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.ended:
            self._left = True
        return message

    async def send(self, message: Message) -> None:
        """The application's answer, up to the first sign of its engine's death."""
        if self.lost or self.refusal.done():
            return
        if self._tells_of_an_error(message):
            self.failed = True
            if not self._is_alive():
                self.lost = True
                return
        if message["type"] == "http.response.start":
            self._begun = True
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._streams = content_type.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
            if self._response is not None and self._streams:
                self._response.saw(bytes(message.get("body", b"")))
        await self._send(message)

    def _tells_of_an_error(self, message: Message) -> bool:
        if message["type"] == "http.response.start":
            return bool(message["status"] >= 500)
        head = bytes(message.get("body", b""))[:200]
        return self._streams and (b'data: {"error"' in head or head.startswith(b"event: error\n"))

    async def end(self, refusal: Refusal) -> None:
        """Send the client the error in the form that it expects."""
        self.ended = self._was_cut = True
        if not self._begun:
            await refuse(self._send, refusal, self._form)
        elif self._streams:
            body = refusal.last_events(self._form, self._response)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        # A whole answer that ended in the middle cannot be completed: the server closes the
        # connection.
