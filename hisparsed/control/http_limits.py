"""How long and how large a client's part of HTTP may be, and whom a full server lets go.

Pure: no sockets, no clocks. ``bounded_http`` is what holds connections to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

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
"""Status, code and words for those who are told; the others are only closed."""

ErrorBody = Callable[[int, str, str], bytes]
"""Status, code and message as the server's clients know errors, in JSON."""


class Waiting(Protocol):
    """A connection that can be let go."""

    def make_room(self) -> None:
        """Close, so that another client can be served."""


@dataclass(slots=True)
class Connections:
    """The connections of one listener.

    Who waits for its answer is never let go; who has not asked yet, or asks slowly, is, the one
    that has waited longest first. So ten thousand idle clients keep nobody out.
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
