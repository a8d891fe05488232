"""One node's control API over a Unix socket or a URL: reads, changes, and the event stream.

Every method raises ``Unreachable`` without an answer and ``Refused`` when the node refuses.
``EventParser`` makes server-sent events out of lines of text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from hisparsed.tui.options import NodeAddress, ViewError
from hisparsed.tui.wire import Document, dig, parse_object


class Unreachable(ViewError):  # noqa: N818 (a state of the node, not a mistake)
    """The node gave no answer."""


class Refused(ViewError):  # noqa: N818 (an answer)
    """The node refused. ``code`` is the API's."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass
class EventParser:
    """Feed it lines without their ends; an empty line completes an event."""

    _kind: str = "message"
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> tuple[str, str] | None:
        """``(kind, data)`` when this line completes an event that has data."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
            return None
        done = (self._kind, "\n".join(self._data)) if self._data else None
        self._kind, self._data = "message", []
        return done


CONNECT_S = 3.0
ANSWER_S = 10.0


class NodeClient:
    """Keeps its connections; ``transport`` replaces the network in tests."""

    def __init__(
        self,
        address: NodeAddress,
        *,
        answer_s: float = ANSWER_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self._answer_s = answer_s
        if transport is None and address.socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=os.fspath(address.socket))
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url=address.base_url,
            timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, **query: str | float) -> Document:
        return await self._ask("GET", path, params=query)

    async def post(self, path: str, body: Document) -> Document:
        return await self._ask("POST", path, json=body)

    async def _ask(self, method: str, path: str, **how: Any) -> Document:
        try:
            response = await self._http.request(method, path, **how)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise _refusal(response)
        try:
            return parse_object(response.content)
        except ValueError:
            raise Refused(
                response.status_code, "not_json", f"{method} {path} was not answered with JSON"
            ) from None

    @asynccontextmanager
    async def events(self, *, timeout_s: float) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
        """The event stream as ``(kind, JSON text)``.

        It ends when the daemon stops; ``Unreachable`` when nothing comes for ``timeout_s``.
        """
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            async with self._http.stream("GET", "/v1/events", timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                yield _events(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        where = self.address
        if isinstance(error, httpx.ConnectTimeout):
            return Unreachable(f"{where}: no connection within {CONNECT_S:g} s")
        if isinstance(error, httpx.TimeoutException):
            return Unreachable(f"{where}: it does not answer; the daemon may be starting or hang")
        if isinstance(error, httpx.ConnectError):
            return Unreachable(f"{where}: {_why_no_connection(where, error)}")
        return Unreachable(f"{where}: it broke off ({type(error).__name__})")


def _why_no_connection(address: NodeAddress, error: httpx.ConnectError) -> str:
    """httpx hides the system's error, so a socket is tried here to find it."""
    if address.socket is None:
        return str(error) or "no connection"
    if not address.socket.exists():
        return "no daemon has this socket; it is stopped or has another control_socket"
    if not os.access(address.socket, os.R_OK | os.W_OK):
        return "you may not use this socket; join its group (usually hisparsed)"
    return f"no process answers on it ({os.strerror(errno.ECONNREFUSED)})"


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    parser = EventParser()
    async for line in response.aiter_lines():
        event = parser.feed(line)
        if event is not None:
            yield event


def _refusal(response: httpx.Response) -> Refused:
    try:
        document = parse_object(response.content)
    except ValueError:
        document = {}
    code = dig(document, "error.code") or "unknown"
    message = dig(document, "error.message") or f"the node answered {response.status_code}"
    return Refused(response.status_code, str(code), str(message))
