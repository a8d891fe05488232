"""What a stream of OpenAI's Responses API has said so far, as far as its last event needs it.

Each event there is numbered, and the one that ends a failed answer repeats the answer that the
first event began. Judges nothing; one object a stream.
"""

from __future__ import annotations

import json
from typing import Any

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
