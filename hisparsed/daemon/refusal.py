"""An answer that the daemon gives in the engine's place, in the form of the API that was asked.

Whole, or as the last events of a stream that has begun. Not for the control API, whose errors
have a form of their own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparsed.daemon.begun_response import BegunResponse
from hisparsed.daemon.error_form import ErrorForm, anthropic_error

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """``kind`` is stable and for programs; ``retry_after_s`` tells when to come back."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None

    def error(self, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
        """The JSON object that clients of the API know."""
        if form is ErrorForm.ANTHROPIC:
            return anthropic_error(self.status, self.message)
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    def last_events(
        self, form: ErrorForm = ErrorForm.OPENAI, begun: BegunResponse | None = None
    ) -> bytes:
        """What ends a stream of server-sent events that has begun with 200.

        ``begun`` is what a stream of the Responses API has said so far.
        """
        if form is ErrorForm.ANTHROPIC:
            return b"event: error\ndata: " + self.error(form) + b"\n\n"
        if form is ErrorForm.RESPONSES:
            return (begun or BegunResponse()).failed(self.kind, self.message)
        return b"data: " + self.error() + b"\n\ndata: [DONE]\n\n"


async def refuse(send: Send, refusal: Refusal, form: ErrorForm = ErrorForm.OPENAI) -> None:
    """Answer with the whole of it."""
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
