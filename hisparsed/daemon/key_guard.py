"""Asks for an API key on every path but those that say whether the node is well.

An ASGI middleware in front of the gate, so that who has no key holds no place in it. vLLM's own
check guards `/v1` alone, and its application answers calls elsewhere too (`/invocations`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from hisparsed.daemon.error_form import form_of
from hisparsed.daemon.gate import MAX_BODY_BYTES
from hisparsed.daemon.refusal import Refusal, answer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})


class KeyGuard:
    """``app`` for clients that send one of ``api_keys`` as a bearer token; 401 for others.

    Without keys everybody passes.
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
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        given = sha256(key.strip()).digest()
        # All are compared, so the time does not say which one came near.
        return sum(compare_digest(given, known) for known in self._digests) > 0


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    # Taken in and dropped: a client that is cut off while it sends never reads the answer.
    dropped = 0
    while dropped <= MAX_BODY_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    text = "this node asks for an API key; send it as a bearer token"
    body = Refusal(401, "unauthorized", text).error(form_of(scope["path"]))
    await answer(send, 401, body, b"application/json", [(b"www-authenticate", b"Bearer")])
