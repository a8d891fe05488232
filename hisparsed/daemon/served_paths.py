"""Which paths of vLLM's application clients reach: a list, not whatever a version mounts.

An ASGI middleware. vLLM has more for developers, switched on by its environment: they stop the
engine, run code in its workers, or abort the calls of others.
"""

from __future__ import annotations

from typing import Final

from hisparsed.daemon.gate import App, Receive, Scope
from hisparsed.daemon.paths import is_below
from hisparsed.daemon.refusal import Refusal, Send, refuse

SERVED: Final = (
    # About the node.
    "/health",
    "/load",
    "/metrics",
    "/ping",
    "/version",
    # About the API, for people.
    "/docs",
    "/openapi.json",
    "/redoc",
    # Calls, with what is below them: batches, a stored answer, counting tokens.
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
    "/v1/systemone",
    "/detokenize",
    "/tokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    # Of models that embed or judge.
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)


def is_served(path: str) -> bool:
    """Whether ``path`` is in the list or below what is."""
    return any(is_below(path, known) for known in SERVED)


class ServedPaths:
    """``app`` behind the list; other paths are 404."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_served(scope["path"]):
            await refuse(send, Refusal(404, "not_found", "this node serves no such path"))
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)
