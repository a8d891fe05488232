"""The prefill node's side: prefixes kept for a decode node, and the server that sends them.

An offer is kept until it was read or its lease ends. Offers are shared by the engine thread and
the threads that serve readers. An offer that has ended is never read again, so its blocks may be
freed as soon as ``take_ended`` names it.

The TCP server starts one thread per connection. A reader can only read the prefix that it has a
ticket for. Imports no vLLM.
"""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hisparsed.engine.reference.handoff.transfer import (
    HandoffError,
    KindRange,
    PrefixRows,
    Wire,
    pieces,
    prefix_digest,
)


@dataclass(frozen=True)
class Offer:
    """A finished prompt: its tokens, and the blocks that hold their rows."""

    request_id: str
    ticket: str
    token_ids: Sequence[int]
    source_blocks: Sequence[int]
    indexer_blocks: Sequence[int]
    expires_s: float


class Ended(StrEnum):
    READ = "read"
    """A decode node has all of it, or reported that it needs none of it."""
    EXPIRED = "expired"
    """No reader came in time."""


class Offers:
    """``grace_s``: how long a reader may be ahead of the engine step that makes the offer."""

    def __init__(self, clock: Callable[[], float], grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._open: dict[str, Offer] = {}
        self._ended: list[tuple[Offer, Ended]] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, offer: Offer) -> None:
        with self._changed:
            self._open[offer.ticket] = offer
            self._changed.notify_all()

    def find(self, ticket: str, tokens: int, digest: str) -> Offer:
        """The offer, if its first ``tokens`` tokens are those that the reader has.

        Waits for up to ``grace_s``. Raises ``HandoffError``.
        """
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._open, self._grace_s)
            offer = self._require(ticket)
        if not 1 <= tokens <= len(offer.token_ids):
            raise HandoffError(
                f"{tokens} tokens were asked for; the prefix has {len(offer.token_ids)}"
            )
        if prefix_digest(offer.token_ids[:tokens]) != digest:
            raise HandoffError(
                f"the first {tokens} tokens here are not those of the reader's prompt"
            )
        return offer

    @contextmanager
    def reading(self, ticket: str) -> Iterator[None]:
        """The offer cannot end inside. Raises ``HandoffError`` where it has ended."""
        with self._changed:
            self._require(ticket)
            yield

    def read(self, ticket: str) -> None:
        """The reader is done; an offer that has ended already stays so."""
        self._end(ticket, Ended.READ)

    def expire(self) -> None:
        now_s = self._clock()
        with self._changed:
            late = [offer.ticket for offer in self._open.values() if offer.expires_s <= now_s]
        for ticket in late:
            self._end(ticket, Ended.EXPIRED)

    def take_ended(self) -> list[tuple[Offer, Ended]]:
        """Offers that are no longer read, since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def _end(self, ticket: str, how: Ended) -> None:
        with self._changed:
            offer = self._open.pop(ticket, None)
            if offer is not None:
                self._ended.append((offer, how))

    def _require(self, ticket: str) -> Offer:
        offer = self._open.get(ticket)
        if offer is None:
            raise HandoffError(
                "the prefix is not offered: it was never, it was read, or its lease has ended"
            )
        return offer


PROTOCOL = 1
_READER_TIMEOUT_S = 60.0
"""A reader that is slower is cut off; its own timeout is shorter."""


class HandoffServer:
    """Listens from construction on; raises ``OSError`` where the address is taken."""

    def __init__(
        self, host: str, port: int, offers: Offers, rows: PrefixRows, shape: Mapping[str, Any]
    ) -> None:
        self._offers = offers
        self._rows = rows
        self._shape = dict(shape)
        self._lock = threading.Lock()
        self._sent_bytes = 0
        serve = self._serve

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                serve(Wire(self.request, time.monotonic() + _READER_TIMEOUT_S))

        self._tcp = _Listener((host, port), Handler)
        self.port: int = self._tcp.server_address[1]
        self._thread = threading.Thread(
            target=self._tcp.serve_forever, name="handoff-server", daemon=True
        )
        self._thread.start()

    def take_sent_bytes(self) -> int:
        """Row bytes sent since the last call."""
        with self._lock:
            sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def close(self) -> None:
        """Stop listening; readers under way are cut off with the process."""
        self._tcp.shutdown()
        self._tcp.server_close()
        self._thread.join()

    def _serve(self, wire: Wire) -> None:
        """One reader. Its failures are its own: it sees the connection end, and why if it can."""
        try:
            ask = wire.receive_message()
            try:
                if ask.get("release"):
                    self._offers.read(str(ask.get("ticket")))
                    return
                offer, wanted = self._understand(ask)
            except HandoffError as error:
                wire.send_message(error=str(error))
                return
            wire.send_message(protocol=PROTOCOL)
            for piece in wanted:
                self._send(wire, offer, piece)
            if wire.receive_message().get("done"):
                self._offers.read(offer.ticket)
        except HandoffError:
            return

    def _send(self, wire: Wire, offer: Offer, piece: KindRange) -> None:
        blocks = offer.source_blocks if piece.kind == "rows" else offer.indexer_blocks
        with self._offers.reading(offer.ticket):
            data = self._rows.read(piece, blocks)
        wire.send(data.numpy().tobytes())
        with self._lock:
            self._sent_bytes += data.numel()

    def _understand(self, ask: Mapping[str, Any]) -> tuple[Offer, list[KindRange]]:
        if ask.get("protocol") != PROTOCOL:
            raise HandoffError(f"protocol {ask.get('protocol')!r}; this node speaks {PROTOCOL}")
        shape = ask.get("shape")
        if shape != self._shape:
            raise HandoffError(f"another model: {_difference(shape, self._shape)}")
        tokens = _token(ask, "tokens")
        offer = self._offers.find(str(ask.get("ticket")), tokens, str(ask.get("digest")))
        starts = _token(ask, "rows_from"), _token(ask, "index_from")
        return offer, list(pieces(*starts, tokens))


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False


def _token(ask: Mapping[str, Any], key: str) -> int:
    value = ask.get(key)
    if not isinstance(value, int) or value < 0:
        raise HandoffError(f"{key}: {value!r} is not a number of tokens")
    return value


def _difference(theirs: object, ours: Mapping[str, Any]) -> str:
    if not isinstance(theirs, dict):
        return f"its shape is {theirs!r}"
    names = [name for name in (*ours, *theirs) if theirs.get(name) != ours.get(name)]
    return f"{names[0]} is {theirs.get(names[0])!r} there and {ours.get(names[0])!r} here"
