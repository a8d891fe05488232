"""Errors of vLLM's own to a client of the Messages API, in the form that such a client knows.

vLLM looks at a body's JSON and at the kinds of its fields before its Messages API sees the call,
and says what is wrong in OpenAI's form. Answers below 400 pass untouched.
"""

from __future__ import annotations

import json
from typing import Any

from hisparsed.daemon.error_form import anthropic_error
from hisparsed.daemon.refusal import Message, Send


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
    """``body`` again where it is no error that vLLM or FastAPI made.

    The kind follows from the status: those of vLLM up to 0.32 are none that clients know.
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
