"""A node that really serves the control API on a Unix socket, with recorded answers.

It can be slow, refuse, stop and start again; it notes every change that it is sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from recorded_node import recorded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PATHS = {
    "/v1/status": "status",
    "/v1/policy": "policy",
    "/v1/policy/keys": "keys",
    "/v1/history": "history",
    "/v1/decisions": "decisions",
    "/v1/journal/events": "events",
    "/v1/logs": "logs",
    "/v1/requests": "requests",
    "/v1/decisions/{sequence:int}": "tick",
}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    @contextmanager
    def capture_signals(self) -> Any:
        yield


class FakeNode:
    """``answers`` may be changed; ``missing`` gives 404; no answer while ``open`` is not set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = {name: recorded(name) for name in PATHS.values()}
        self.missing: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.refusal: tuple[int, str, str] | None = None
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.gets: list[str] = []
        self.streams = 0
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._server: _Server | None = None

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        routes = [Route(path, self._get, name=name) for path, name in PATHS.items()]
        routes += [
            Route("/v1/events", self._events),
            Route("/v1/{rest:path}", self._post, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.answering.wait()

    async def stop(self) -> None:
        """End every stream and remove the socket."""
        if self._server is None or self._serving is None:
            return
        # First the file, so that no client reconnects while the streams end.
        self.path.unlink(missing_ok=True)
        for queue in self._queues:
            queue.put_nowait(None)
        self._server.should_exit = True
        await self._serving
        self._server = self._serving = None

    def send(self, kind: str, document: Any) -> None:
        """To every open stream."""
        for queue in self._queues:
            queue.put_nowait(f"event: {kind}\ndata: {json.dumps(document)}\n\n")

    async def _get(self, request: Request) -> Response:
        self.gets.append(request.url.path)
        await self.open.wait()
        name = next(one.name for one in request.app.routes if _serves(one, request))
        if name in self.missing:
            return JSONResponse({"error": {"code": "not_found", "message": "no"}}, 404)
        return JSONResponse(self.answers[name])

    async def _post(self, request: Request) -> Response:
        self.posts.append((request.url.path, json.loads(await request.body())))
        if self.refusal is not None:
            status, code, message = self.refusal
            return JSONResponse({"error": {"code": code, "message": message}}, status)
        return JSONResponse({"generation": 3})

    async def _events(self, request: Request) -> Response:
        self.streams += 1
        await self.open.wait()
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield f"event: status\ndata: {json.dumps(self.answers['status'])}\n\n"
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)


def _serves(route: Any, request: Request) -> bool:
    match, _ = route.matches(request.scope)
    return bool(match.value == 2) and route.name in PATHS.values()
