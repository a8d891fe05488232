"""An answer that the daemon gives in the engine's place, in the form of OpenAI's errors.

Whole, or as the last events of a stream that has begun. Not for the control API, whose errors
have a form of their own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """``kind`` is stable and for programs; ``retry_after_s`` tells when to come back."""

    status: int
    kind: str
    message: str
    retry_after_s: float | None = None

    def error(self) -> bytes:
        """The JSON object that clients of OpenAI's API know."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    def last_events(self) -> bytes:
        """What ends a stream of server-sent events that has begun with 200."""
        return b"data: " + self.error() + b"\n\ndata: [DONE]\n\n"


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answer with the whole of it."""
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_after_s))).encode()))
    await answer(send, refusal.status, refusal.error(), b"application/json", headers)


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
