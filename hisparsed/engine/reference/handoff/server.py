"""The prefill node's side of a transfer: a TCP listener that serves offered prefixes.

A thread a reader, started on connection. Nothing a reader sends can do more than read the
prefix it has a ticket for. Knows no vLLM.
"""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Mapping
from typing import Any

from hisparsed.engine.reference.handoff.offers import Offer, Offers
from hisparsed.engine.reference.handoff.rows import Piece, PrefixRows, pieces
from hisparsed.engine.reference.handoff.wire import HandoffError, Wire

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

    def _send(self, wire: Wire, offer: Offer, piece: Piece) -> None:
        blocks = offer.source_blocks if piece.kind == "rows" else offer.indexer_blocks
        with self._offers.reading(offer.ticket):
            data = self._rows.read(piece, blocks)
        wire.send(data.numpy().tobytes())
        with self._lock:
            self._sent_bytes += data.numel()

    def _understand(self, ask: Mapping[str, Any]) -> tuple[Offer, list[Piece]]:
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
