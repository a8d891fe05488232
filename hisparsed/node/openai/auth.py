"""API keys: every path except those for health and metrics requires one.

An ASGI middleware in front of admission, so that a client without a key takes no slot there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

from hisparsed.config.node import read_api_keys
from hisparsed.node.openai.admission import MAX_BODY_BYTES
from hisparsed.node.openai.errors import ErrorForm, Refusal, answer, form_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})


KEY_ENV = "VLLM_API_KEY"
"""vLLM's own way to name the one key."""


def keys_of(key_file: Path | None, environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """The keys that clients may send: those of the file, else the one in ``environ``.

    Takes that out, because vLLM would put its own check behind this one. Raises ``OSError``.
    """
    own = environ.pop(KEY_ENV, "").strip()
    if key_file is not None:
        return tuple(read_api_keys(key_file))
    return (own,) if own else ()


class KeyGuard:
    """``app`` for clients that send one of ``api_keys``; 401 for others.

    As a bearer token, or on the Messages API as ``x-api-key`` too, which is what Anthropic's
    clients send. Without keys every client passes.
    """

    def __init__(self, app: App, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._digests and self._needs_key(scope) and not self._has_key(scope):
            await _refuse(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        if scope["type"] == "websocket":
            return True
        # Browsers ask with OPTIONS before they may send a key.
        return (
            scope["type"] == "http"
            and scope["method"] != "OPTIONS"
            and scope["path"] not in OPEN_PATHS
        )

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        words = headers.get(b"authorization", b"").split(maxsplit=1)
        given = words[1:] if words and words[0].lower() == b"bearer" else []
        if form_of(scope["path"]) is ErrorForm.ANTHROPIC and b"x-api-key" in headers:
            given.append(headers[b"x-api-key"])
        # All keys are compared, so the time does not reveal a partial match.
        digests = [sha256(_text(one).strip().encode()).digest() for one in given]
        return sum(compare_digest(one, known) for one in digests for known in self._digests) > 0


def _text(header: bytes) -> str:
    """Clients send non-ASCII characters in either encoding."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    # Read and dropped: a client that is cut off while it sends never reads the answer.
    dropped = 0
    while dropped <= MAX_BODY_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    form = form_of(scope["path"])
    text = "this node requires an API key; send it as a bearer token"
    if form is ErrorForm.ANTHROPIC:
        text += " or as x-api-key"
    body = Refusal(401, "unauthorized", text).error(form)
    await answer(send, 401, body, b"application/json", [(b"www-authenticate", b"Bearer")])
