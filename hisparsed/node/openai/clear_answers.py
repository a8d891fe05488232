"""Rewrites answers of vLLM's application for this node: an ASGI middleware around it.

Errors name the arguments of this node's document instead of vLLM's command line, and have the form
of the API that was called wherever FastAPI made them. The list of models has the limit in force. An
answer that begins while the node stops closes its connection: a client that keeps it open would
send its next call to a node that ends. Streams and all other answers pass unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from hisparsed.engine.context_limit import ContextLimit
from hisparsed.node.openai.errors import App, Message, Receive, Refusal, Send, form_of, is_below

_ARGUMENTS: Final = {
    "--tool-call-parser": "frontend_args.tool_call_parser",
    "--enable-auto-tool-choice": "frontend_args.enable_auto_tool_choice",
    "--tool-parser-plugin": "frontend_args.tool_parser_plugin",
    "--trust-request-chat-template": "frontend_args.trust_request_chat_template",
    "--chat-template": "frontend_args.chat_template",
    "--reasoning-parser": "engine_args.reasoning_parser",
    "--max-logprobs": "engine_args.max_logprobs",
    "--max-model-len": "engine_args.max_model_len",
}
_ARGUMENT: Final = re.compile(r"--[a-z][a-z-]+[a-z]")
_NO_ROOM: Final = re.compile(r"max_tokens must be at least 1, got 0\b")
_ASKED_NOTHING: Final = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*0\s*[,}]')
_OVERLAP: Final = 64
"""Bytes of one message that are looked at again with the next; longer than what is looked for."""
_MODELS: Final = "/v1/models"
_CLOSE: Final = (b"connection", b"close")
_LENGTH: Final = b"content-length"


class ClearAnswers:
    """``stops`` returns whether the node is stopping."""

    def __init__(self, app: App, limit: ContextLimit, stops: Callable[[], bool]) -> None:
        self._app = app
        self._limit = limit
        self._stops = stops

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(receive)
        await self._app(scope, call, _Answer(send, scope, call, self._limit, self._stops))


class _Call:
    """``receive`` of one call. Reads its body as it passes, and does not keep it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._end = b""
        self.asks_nothing = False
        """The client itself asked for an answer of no token."""

    async def __call__(self) -> Message:
        message = await self._receive()
        body = self._end + message.get("body", b"")
        self.asks_nothing = self.asks_nothing or bool(_ASKED_NOTHING.search(body))
        self._end = body[-_OVERLAP:]
        return message


class _Answer:
    """``send`` of one response; an answer that may change is held until it is whole."""

    def __init__(
        self,
        send: Send,
        scope: MutableMapping[str, Any],
        call: _Call,
        limit: ContextLimit,
        stops: Callable[[], bool],
    ) -> None:
        self._send = send
        self._call = call
        self._path = str(scope["path"])
        self._method = str(scope["method"])
        self._limit = limit
        self._stops = stops
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if self._stops():
                headers = [one for one in headers if one[0].lower() != _CLOSE[0]]
                message = {**message, "headers": [*headers, _CLOSE]}
            if self._may_change(message["status"], dict(headers)):
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = self._changed(self._start["status"])
        kept = [one for one in self._start["headers"] if one[0].lower() != _LENGTH]
        length = (_LENGTH, str(len(body)).encode())
        await self._send({**self._start, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})

    def _may_change(self, status: int, headers: dict[bytes, bytes]) -> bool:
        if not headers.get(b"content-type", b"").startswith(b"application/json"):
            return False
        return 400 <= status < 500 or (status == 200 and is_below(self._path, _MODELS))

    def _changed(self, status: int) -> bytes:
        try:
            answer = json.loads(self._body)
        except ValueError:
            return self._body
        if not isinstance(answer, dict):
            return self._body
        if status == 200:
            return self._with_limit(answer)
        if isinstance(detail := answer.get("detail"), str):
            return self._not_served(status, detail)
        error = answer.get("error")
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            return self._body
        before = error["message"]
        self._clear(error)
        return self._body if error["message"] == before else json.dumps(answer).encode()

    def _clear(self, error: dict[str, Any]) -> None:
        message = _ARGUMENT.sub(lambda found: _ARGUMENTS.get(found[0], found[0]), error["message"])
        longest = self._limit.model_tokens
        no_room = _NO_ROOM.match(message) and error.get("param") == "max_tokens"
        if longest is not None and no_room and not self._call.asks_nothing:
            # vLLM fills in what is left next to the prompt, and then refuses its own number.
            message = ContextLimit.words(longest, longest)
            error["param"] = "input_tokens"
        error["message"] = message

    def _not_served(self, status: int, detail: str) -> bytes:
        message = f"{self._method} {self._path}: {detail}"
        if status == 404:
            message = f"this node does not serve {self._method} {self._path}"
        kind = "not_found" if status == 404 else "invalid_request_error"
        return Refusal(status, kind, message).error(form_of(self._path))

    def _with_limit(self, answer: dict[str, Any]) -> bytes:
        limit = self._limit.in_force
        listed = answer.get("data")
        cards = listed if isinstance(listed, list) else [answer]
        if limit is None:
            return self._body
        for card in cards:
            if isinstance(card, dict) and isinstance(card.get("max_model_len"), int):
                card["max_model_len"] = min(card["max_model_len"], limit)
        return json.dumps(answer).encode()
