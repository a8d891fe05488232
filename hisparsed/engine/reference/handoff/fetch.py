"""The decode node's side of a transfer: fetches prefixes on threads, writes nothing itself.

A fetched prefix is whole and checked, or it is a failure with a reason; the engine thread
takes results between steps and writes them. Every fetch ends by its timeout.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hisparsed.engine.reference.handoff.params import RemotePrefix
from hisparsed.engine.reference.handoff.rows import Piece, PrefixRows, pieces
from hisparsed.engine.reference.handoff.server import PROTOCOL
from hisparsed.engine.reference.handoff.wire import HandoffError, Wire

_AT_ONCE = 4


@dataclass(frozen=True)
class Wanted:
    """One prefix to fetch for ``request_id`` of this node.

    ``tokens`` of it, ``digest`` their name; rows of each kind from where this node's own
    prefix ends. The blocks are this node's.
    """

    request_id: str
    remote: RemotePrefix
    tokens: int
    digest: str
    rows_from: int
    index_from: int
    source_blocks: tuple[int, ...]
    indexer_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Fetched:
    """``data``: all pieces of the prefix, or none and ``error`` says why."""

    wanted: Wanted
    data: tuple[tuple[Piece, torch.Tensor], ...]
    error: str | None


class Fetcher:
    """Up to four fetches at once; those behind them wait within their own timeout."""

    def __init__(self, rows: PrefixRows, shape: Mapping[str, Any], timeout_s: float) -> None:
        self._rows = rows
        self._shape = dict(shape)
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="handoff-fetch")
        self._results: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False

    def start(self, wanted: Wanted) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        self._pool.submit(self._run, wanted, deadline_s)

    def release(self, remote: RemotePrefix) -> None:
        """Tell the prefill node that its prefix is not needed; its lease ends it otherwise."""
        deadline_s = time.monotonic() + self._timeout_s
        self._pool.submit(self._tell, remote, deadline_s)

    def take(self) -> list[Fetched]:
        """Results since the last call."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Cut what is under way; no result comes any more."""
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(cancel_futures=True)

    def _run(self, wanted: Wanted, deadline_s: float) -> None:
        try:
            data = self._fetch(wanted, deadline_s)
        except HandoffError as error:
            self._results.put(Fetched(wanted, (), str(error)))
            self._tell(wanted.remote, deadline_s)
        except Exception as error:
            # A defect here must not leave its request waiting for ever.
            self._results.put(Fetched(wanted, (), repr(error)))
        else:
            self._results.put(Fetched(wanted, data, None))

    def _fetch(self, wanted: Wanted, deadline_s: float) -> tuple[tuple[Piece, torch.Tensor], ...]:
        with self._connect(wanted.remote, deadline_s) as sock:
            wire = Wire(sock, deadline_s)
            wire.send_message(
                protocol=PROTOCOL,
                shape=self._shape,
                ticket=wanted.remote.ticket,
                tokens=wanted.tokens,
                digest=wanted.digest,
                rows_from=wanted.rows_from,
                index_from=wanted.index_from,
            )
            answer = wire.receive_message()
            if answer.get("protocol") != PROTOCOL:
                raise HandoffError(f"refused: {answer.get('error')}")
            parts = pieces(wanted.rows_from, wanted.index_from, wanted.tokens)
            data = tuple((piece, self._receive(wire, piece)) for piece in parts)
            wire.send_message(done=True)
            return data

    def _receive(self, wire: Wire, piece: Piece) -> torch.Tensor:
        right = self._rows.piece_bytes(piece)
        payload = wire.receive(right)
        if len(payload) != right:
            raise HandoffError(
                f"{piece.kind} [{piece.start}, {piece.end}) came as {len(payload)} bytes; "
                f"{right} would be right"
            )
        return torch.frombuffer(payload, dtype=torch.int8)

    def _tell(self, remote: RemotePrefix, deadline_s: float) -> None:
        try:
            with self._connect(remote, deadline_s) as sock:
                Wire(sock, deadline_s).send_message(release=True, ticket=remote.ticket)
        except HandoffError:
            return

    @contextmanager
    def _connect(self, remote: RemotePrefix, deadline_s: float) -> Iterator[socket.socket]:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise HandoffError(f"no time was left to connect to {remote.address}")
        try:
            sock = socket.create_connection((remote.host, remote.port), timeout=left_s)
        except OSError as error:
            raise HandoffError(f"{remote.address} cannot be reached: {error}") from error
        with sock:
            with self._lock:
                if self._closed:
                    raise HandoffError("this node is shutting down")
                self._sockets.add(sock)
            try:
                yield sock
            finally:
                with self._lock:
                    self._sockets.discard(sock)
