"""The listener of the OpenAI side around a scripted application, and clients of raw bytes.

Key guard, list of paths, admission, limits and sockets are the daemon's own; only vLLM is not here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import PlainTextResponse

from hisparsed.control.api.http_server import Connections, HttpLimits
from hisparsed.node.openai.admission import Admission
from hisparsed.node.openai.server import http_server, openai_app
from hisparsed.node.openai.session_limit import Queue, SessionLimiter
from hisparsed.node.resources import bind_tcp

SHORT = HttpLimits(header_s=0.1, body_s=0.1, idle_s=0.5, write_s=0.3)
LONG_S = 20.0
"""No test waits so long; a client that is still there then fails it."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Client:
    """One connection. ``send`` bytes, read an ``answer``, wait for the ``end``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        async with asyncio.timeout(LONG_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            fields = (line.partition(": ") for line in lines if line)
            headers = {name.lower(): value for name, _, value in fields}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(first.split()[1]), headers, body)

    async def rest(self) -> bytes:
        """The bytes that arrive until the server closes the connection."""
        parts = bytearray()
        async with asyncio.timeout(LONG_S):
            try:
                while part := await self.reader.read(65_536):
                    parts += part
            except ConnectionResetError:
                pass
        return bytes(parts)

    async def close(self) -> None:
        self.writer.close()


class Edge:
    """``calls`` is what the application was asked; ``hold`` keeps its answers back."""

    def __init__(
        self, limits: HttpLimits = SHORT, *, api_keys: tuple[str, ...] = (), stream_bytes: int = 0
    ) -> None:
        self.calls: list[tuple[str, str, bytes]] = []
        self.asked = asyncio.Semaphore(0)
        self.while_asked: Callable[[], None] = lambda: None
        self.gone = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.stream_bytes = stream_bytes
        self.connections = Connections(limits)
        sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
        self.admission = Admission(
            self._application, sessions=sessions, metrics_page=PlainTextResponse("up 1\n")
        )
        self._server = http_server(openai_app(self.admission, api_keys=api_keys), self.connections)
        self._socket = bind_tcp("127.0.0.1", 0, key="api.port")
        self.port: int = self._socket.getsockname()[1]
        self._serving: asyncio.Task[None] | None = None
        self._clients: list[Client] = []

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await self._server.ready.wait()

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        self.hold.set()
        self._server.should_exit = True
        assert self._serving is not None
        await self._serving

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def ask(self, method: str = "GET", path: str = "/v1/models", **parts: Any) -> Answer:
        """One request of a well-behaved client."""
        client = await self.client()
        await client.send(request(method, path, **parts))
        answer = await client.answer()
        await client.close()
        return answer

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        self.calls.append((scope["method"], scope["path"], body))
        self.asked.release()
        self.while_asked()
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self.stream_bytes:
            await self._stream(start, receive, send)
            return
        await self.hold.wait()
        start["headers"] = [(b"content-length", b"2")]
        await send(start)
        await send({"type": "http.response.body", "body": b"{}"})

    async def _stream(self, start: Any, receive: Any, send: Any) -> None:
        """Events until the client is gone, as vLLM's stream listens for it."""
        await send(start)
        listening = asyncio.ensure_future(receive())
        while not listening.done():
            chunk = b"x" * self.stream_bytes
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        assert listening.result()["type"] == "http.disconnect"
        self.gone.set()


def request(
    method: str = "GET",
    path: str = "/v1/models",
    body: bytes = b"",
    headers: tuple[str, ...] = (),
) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1", "host: node", *headers]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
