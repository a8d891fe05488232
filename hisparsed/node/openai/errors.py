"""Errors that the daemon sends instead of the engine, in the form of the API that was called.

OpenAI's, OpenAI Responses' and Anthropic's, chosen by the path. An error is a whole response, or
the last events of a stream that has begun. Errors of vLLM on the Messages API are rewritten to
Anthropic's form; answers below 400 pass unchanged. Not for the control API, whose errors have their
own form.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


def is_below(path: str, root: str) -> bool:
    """Whether ``path`` is ``root`` or continues below it."""
    return path == root or path.startswith(f"{root}/")


class ErrorForm(StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    """The Messages API: it has its own kinds of errors, and streams end with ``event: error``."""
    RESPONSES = "responses"
    """OpenAI's Responses API: as ``OPENAI``, but every event of a stream is typed and counted."""


_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def form_of(path: str) -> ErrorForm:
    """Of a request to ``path``."""
    if is_below(path, "/v1/messages"):
        return ErrorForm.ANTHROPIC
    if is_below(path, "/v1/responses"):
        return ErrorForm.RESPONSES
    return ErrorForm.OPENAI


def anthropic_error(status: int, message: str) -> bytes:
    """The JSON object that Anthropic's clients know; its kind follows from the HTTP status."""
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else _ANTHROPIC_KINDS[400])
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


_FIRST = b"event: response.created\ndata: "
_EVENT_END = b"\n\n"


class BegunResponse:
    """``saw`` every part of the stream, in order."""

    def __init__(self) -> None:
        self._first = b""
        self._events = 0

    def saw(self, part: bytes) -> None:
        if not self._events and part.startswith(_FIRST):
            self._first = part[len(_FIRST) :].split(_EVENT_END, 1)[0]
        self._events += part.count(_EVENT_END)

    @property
    def id(self) -> str | None:
        """``None`` before it has begun."""
        answer = self._answer()
        found = answer.get("id") if answer is not None else None
        return found if isinstance(found, str) else None

    def failed(self, kind: str, message: str) -> bytes:
        """The last event: ``response.failed``, or ``error`` where no answer was begun."""
        answer = self._answer()
        if answer is None:
            event: dict[str, Any] = {
                "type": "error",
                "code": kind,
                "message": message,
                "param": None,
                "sequence_number": self._events,
            }
        else:
            error = {"code": "server_error", "message": message}
            event = {
                "type": "response.failed",
                "sequence_number": self._events,
                "response": {**answer, "status": "failed", "error": error},
            }
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

    def _answer(self) -> dict[str, Any] | None:
        try:
            answer = json.loads(self._first)["response"]
        except (ValueError, KeyError, TypeError):
            return None
        return answer if isinstance(answer, dict) else None


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """``kind`` is stable and for programs; ``retry_after_s`` says when to retry."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    """The part of the call that is to blame."""

    def error(self, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
        """The JSON object that clients of the API know."""
        if form is ErrorForm.ANTHROPIC:
            return anthropic_error(self.status, self.message)
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()

    def last_events(
        self, form: ErrorForm = ErrorForm.OPENAI, begun: BegunResponse | None = None
    ) -> bytes:
        """The end of a stream of server-sent events that began with status 200.

        ``begun``: the events that a stream of the Responses API has sent so far.
        """
        if form is ErrorForm.ANTHROPIC:
            return b"event: error\ndata: " + self.error(form) + b"\n\n"
        if form is ErrorForm.RESPONSES:
            return (begun or BegunResponse()).failed(self.kind, self.message)
        return b"data: " + self.error() + b"\n\ndata: [DONE]\n\n"


async def refuse(send: Send, refusal: Refusal, form: ErrorForm = ErrorForm.OPENAI) -> None:
    """Send it as a whole response."""
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_after_s))).encode()))
    await answer(send, refusal.status, refusal.error(form), b"application/json", headers)


async def answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """One whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


class AnthropicErrors:
    """``send`` for one response; whole answers of 400 and more are held until they are complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._held = message
            return
        start = self._held
        if start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = as_anthropic_error(start["status"], self._body)
        headers = [(name, value) for name, value in start.get("headers", ()) if name != _LENGTH]
        headers.append((_LENGTH, str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


_LENGTH = b"content-length"


def as_anthropic_error(status: int, body: bytes) -> bytes:
    """Returns ``body`` unchanged if it is not an error of vLLM or FastAPI.

    The kind follows from the status, because clients do not know the kinds of vLLM up to 0.32.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    message = _message(answer)
    return body if message is None else anthropic_error(status, message)


def _message(answer: Any) -> str | None:
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else answer.get("detail")
    return message if isinstance(message, str) else None
