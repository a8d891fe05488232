"""uvicorn's HTTP server with limits on a client's headers, body, silence and reading.

uvicorn bounds idle connections only, and with httptools not the size of headers. A late client gets
408 if it asked for something, but never in the middle of an answer. ``Connections`` decides which
connection a full server closes: never one that waits for its answer. Serves the control socket and
the OpenAI API.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_BYTES: Final = 64 * 1024
"""Of one request: line and headers. Browsers and routers send a few thousand."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of one listener. Times are seconds."""

    connections: int = 4_096
    header_s: float = 10.0
    """From connecting, or from a request's first byte, until its headers are whole."""
    body_s: float = 60.0
    """From the headers until the body is whole."""
    idle_s: float = 75.0
    """Between two requests of one connection."""
    write_s: float = 60.0
    """While a client takes nothing of an answer."""
    header_bytes: int = HEADER_BYTES


class Cut(StrEnum):
    """Why a connection was refused or ended before its time; label values of a metric."""

    MALFORMED = "malformed"
    HEADERS_TOO_LARGE = "headers-too-large"
    SLOW_HEADERS = "slow-headers"
    SLOW_BODY = "slow-body"
    SLOW_READER = "slow-reader"
    NEVER_ASKED = "never-asked"
    MADE_ROOM = "made-room"
    FULL = "full"


REFUSALS: Final = {
    Cut.MALFORMED: (400, "bad_request", "this is not HTTP/1.1"),
    Cut.HEADERS_TOO_LARGE: (431, "headers_too_large", "the headers are too large"),
    Cut.SLOW_HEADERS: (408, "request_timeout", "the headers did not arrive in time"),
    Cut.SLOW_BODY: (408, "request_timeout", "the body did not arrive in time"),
    Cut.FULL: (503, "too_many_connections", "every connection of this node is in use"),
}
"""Status, code and message of cuts with an answer; the others are only closed."""

ErrorBody = Callable[[int, str, str], bytes]
"""Status, code and message as the server's clients know errors, in JSON."""


class Waiting(Protocol):
    """A connection that can be let go."""

    def make_room(self) -> None:
        """Close, so that another client can be served."""


@dataclass(slots=True)
class Connections:
    """The connections of one listener.

    A connection that waits for its answer is never closed. One that has not asked yet, or asks
    slowly, is closed, the oldest first. So ten thousand idle clients exclude no other.
    """

    limits: HttpLimits
    open: int = 0
    cut: dict[Cut, int] = field(default_factory=lambda: dict.fromkeys(Cut, 0))
    _unanswered: dict[Waiting, None] = field(default_factory=dict)

    def admit(self, connection: Waiting) -> bool:
        """Take ``connection`` in, and let another go for it where there is no room."""
        if self.open >= self.limits.connections:
            if not self._unanswered:
                return False
            longest = next(iter(self._unanswered))
            self.leave(longest)
            longest.make_room()
        self.open += 1
        self._unanswered[connection] = None
        return True

    def waits_for_answer(self, connection: Waiting) -> None:
        self._unanswered.pop(connection, None)

    def waits_for_client(self, connection: Waiting) -> None:
        """As of now: it goes to the end of the line."""
        self._unanswered.pop(connection, None)
        self._unanswered[connection] = None

    def leave(self, connection: Waiting) -> None:
        """Of an admitted connection, once."""
        self.open -= 1
        self._unanswered.pop(connection, None)


class _Phase(Enum):
    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ANSWERING = auto()
    CLOSED = auto()


_OF_UPGRADES = (b"upgrade", b"http2-settings")


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Without those that ask for another protocol."""
    for name, value in headers:
        if name == b"connection":
            words = [word.strip() for word in value.split(b",")]
            yield name, b", ".join(word for word in words if word.lower() not in _OF_UPGRADES)
        elif name not in _OF_UPGRADES:
            yield name, value


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``bounded_protocol`` makes the class that a server's configuration takes."""

    bounds: Connections
    error_body: ErrorBody

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._phase = _Phase.CLOSED
        self._asked = False
        self._header_bytes = 0
        self._broken: Cut | None = None
        if self.bounds.admit(self):
            self._enter(_Phase.IDLE)
        else:
            self._refuse(Cut.FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.CLOSED:
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADERS)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._broken = self._broken or Cut.MALFORMED
        if self._phase is _Phase.HEADERS:
            self._header_bytes += len(data)
            if self._header_bytes > self.bounds.limits.header_bytes:
                self._broken = Cut.HEADERS_TOO_LARGE
        if self._broken is not None:
            self._refuse(self._broken)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again as the plain one that it also is.

        The parser leaves out the body of a request with ``Upgrade: h2c``, which some clients send
        with each first request.
        """
        if (method := self.parser.get_method()) == b"CONNECT":
            self._broken = Cut.MALFORMED
            return
        words = [method, self.url, b"HTTP/1.1"]
        lines = [b" ".join(words), *(b": ".join(one) for one in _plain(self.headers)), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines) + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._enter(_Phase.HEADERS)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.bounds.limits.header_bytes:
            self._broken = Cut.HEADERS_TOO_LARGE
        if self._broken is not None or self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._asked = True
        self._enter(_Phase.BODY)

    def on_body(self, body: bytes) -> None:
        if self._broken is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._broken is not None or self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._enter(_Phase.ANSWERING if self._answering() else _Phase.IDLE)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # this server's own timeout applies
        if self._phase is _Phase.ANSWERING:
            self._enter(_Phase.ANSWERING if self._answering() else _Phase.IDLE)
        elif self._phase in (_Phase.HEADERS, _Phase.BODY):
            # The next request began during the answer; its time counts from now.
            self.bounds.waits_for_client(self)
            self._enter(self._phase)

    def pause_writing(self) -> None:
        super().pause_writing()
        limit_s = self.bounds.limits.write_s
        self._stalled = self.loop.call_later(limit_s, self._reads_nothing)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def make_room(self) -> None:
        """For another connection; the books are done already."""
        self._count(Cut.MADE_ROOM)
        if self._phase is not _Phase.IDLE:
            self.transport.write(self._refusal(Cut.FULL))
        self._phase = _Phase.CLOSED
        self._cancel_deadline()
        self.transport.close()

    def _answering(self) -> bool:
        """Whether an answer is being made or sent."""
        cycle = self._current()
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete)

    def _current(self) -> RequestResponseCycle | None:
        """Of the latest request; uvicorn declares that there always is one."""
        return self.cycle

    def _enter(self, phase: _Phase) -> None:
        if self.transport.is_closing():
            return
        self._cancel_deadline()
        self._phase = phase
        limits = self.bounds.limits
        if phase is _Phase.ANSWERING:
            self.bounds.waits_for_answer(self)
            return
        if phase is _Phase.IDLE:
            self.bounds.waits_for_client(self)
            after_s = limits.idle_s if self._asked else limits.header_s
        elif phase is _Phase.HEADERS:
            after_s = limits.header_s
        else:
            after_s = limits.body_s
        self._deadline = self.loop.call_later(after_s, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self._phase is _Phase.IDLE:
            if not self._asked:
                self._count(Cut.NEVER_ASKED)
            self._close()
            self.transport.close()
        elif self._phase is _Phase.BODY and self.cycle.response_complete:
            self._cut_off(Cut.SLOW_BODY)  # answered already, such as with 401
        elif self._phase is _Phase.BODY and not self.pipeline and not self.cycle.response_started:
            self._refuse(Cut.SLOW_BODY)
        elif self._phase is _Phase.HEADERS and not self._answering():
            self._refuse(Cut.SLOW_HEADERS)

    def _reads_nothing(self) -> None:
        self._stalled = None
        self._count(Cut.SLOW_READER)
        self._close()
        self.transport.abort()

    def _refuse(self, cut: Cut) -> None:
        """Tell the client where no answer is under way, and close."""
        if self.pipeline or (self._answering() and self.cycle.response_started):
            self._cut_off(cut)
            return
        self._count(cut)
        self._close()
        cycle = self._current()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(self._refusal(cut))
        self.transport.close()

    def _cut_off(self, cut: Cut) -> None:
        self._count(cut)
        self._close()
        self.transport.close()

    def _refusal(self, cut: Cut) -> bytes:
        status, code, message = REFUSALS[cut]
        body = type(self).error_body(status, code, message)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            + ("retry-after: 1\r\n" if cut is Cut.FULL else "")
            + "connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body

    def _count(self, cut: Cut) -> None:
        self.bounds.cut[cut] += 1

    def _close(self) -> None:
        """Leave the books; harmless when that was done."""
        self._cancel_deadline()
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            self.bounds.leave(self)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bounded_protocol(
    connections: Connections,
    error_body: ErrorBody,
    base: type[BoundedProtocol] = BoundedProtocol,
) -> type[BoundedProtocol]:
    """``base`` for one listener; what uvicorn's ``http`` setting takes."""
    members = {"bounds": connections, "error_body": staticmethod(error_body)}
    return type(base.__name__, (base,), members)


class QuietServer(uvicorn.Server):
    """Leaves signals and logs to the daemon, and says when it answers."""

    def __init__(self, app: Any, protocol: type[asyncio.Protocol], *, graceful_s: int) -> None:
        """``graceful_s``: how long open calls get when it is asked to end."""
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,
                # The applications behind it come and go; each starts and ends with its engine.
                lifespan="off",
                # Headers that name a client are not trusted; the kernel names the peer.
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=graceful_s,
            )
        )
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def listen_on(self, listener: socket.socket) -> None:
        """Take new connections from ``listener`` and no longer from the sockets before it."""
        loop = asyncio.get_running_loop()
        before, self.servers = self.servers, []
        for server in before:
            server.close()

        def protocol() -> asyncio.Protocol:
            make: Any = self.config.http_protocol_class
            made: asyncio.Protocol = make(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self.servers.append(await loop.create_server(protocol, sock=listener))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
