"""With an API key set, ``/invocations`` answers without one.

``AuthenticationMiddleware`` guards paths by prefix, and ``/invocations`` runs the same handlers as
``/v1/chat/completions``.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.upstream.outcome import run

PLACES = ("serve.middleware.authenticate", "serve.utils.server_utils")
GUARDED, OTHER = "/v1/completions", "/invocations"


def middleware() -> Any:
    for place in PLACES:
        name = f"vllm.entrypoints.{place}"
        if find_spec(name) is not None:
            module = import_module(name)
            if hasattr(module, "AuthenticationMiddleware"):
                return module.AuthenticationMiddleware
    raise ImportError(f"none of {PLACES} has AuthenticationMiddleware")


async def status_of(path: str) -> int:
    """Of a call without a key; what is served answers 200."""
    seen: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    await middleware()(application, tokens=["key"])(scope, None, send)
    return seen[0]


def reproduce() -> str | None:
    guarded, other = (asyncio.run(status_of(path)) for path in (GUARDED, OTHER))
    assert guarded == 401
    if other == 401:
        return None
    return f"Without the key POST {GUARDED} answers {guarded} and POST {OTHER} is served."


if __name__ == "__main__":
    run(reproduce)
