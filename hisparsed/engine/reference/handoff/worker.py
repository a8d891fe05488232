"""The worker's half of the hand-over: offers kept, prefixes fetched and written, all counted.

``HandoffWorker`` is called once per step on the engine thread, which alone writes into the pools.
``Fetcher`` is the decode node's side of a transfer: it fetches on threads and writes nothing. A
fetched prefix is whole and checked, or it is a failure with a reason. Every fetch ends by its
timeout.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hisparsed.engine.reference.handoff.scheduler import (
    HandoffAddress,
    HandoffMetadata,
    HandoffWorkerMetadata,
    RemotePrefix,
    Wanted,
)
from hisparsed.engine.reference.handoff.server import PROTOCOL, Ended, HandoffServer, Offer, Offers
from hisparsed.engine.reference.handoff.transfer import (
    HandoffError,
    KindRange,
    PrefixRows,
    Wire,
    model_shape,
    pieces,
)
from hisparsed.engine.reference.store import KVStore

_AT_ONCE = 4


@dataclass(frozen=True)
class Fetched:
    """``data``: all pieces of the prefix, or none, with the reason in ``error``."""

    wanted: Wanted
    data: tuple[tuple[KindRange, torch.Tensor], ...]
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
        """Release a prefix that the prefill node keeps; its lease ends it otherwise."""
        deadline_s = time.monotonic() + self._timeout_s
        self._pool.submit(self._send_release, remote, deadline_s)

    def take(self) -> list[Fetched]:
        """Results since the last call."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Cut the fetches in progress; no further result arrives."""
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
            self._send_release(wanted.remote, deadline_s)
        except Exception as error:
            # A defect here must not leave its request waiting forever.
            self._results.put(Fetched(wanted, (), repr(error)))
        else:
            self._results.put(Fetched(wanted, data, None))

    def _fetch(
        self, wanted: Wanted, deadline_s: float
    ) -> tuple[tuple[KindRange, torch.Tensor], ...]:
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

    def _receive(self, wire: Wire, piece: KindRange) -> torch.Tensor:
        right = self._rows.piece_bytes(piece)
        payload = wire.receive(right)
        if len(payload) != right:
            raise HandoffError(
                f"{piece.kind} [{piece.start}, {piece.end}) came as {len(payload)} bytes instead "
                f"of {right}"
            )
        return torch.frombuffer(payload, dtype=torch.int8)

    def _send_release(self, remote: RemotePrefix, deadline_s: float) -> None:
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


log = logging.getLogger("hisparsed.engine")

_GRACE_S = 1.0


@dataclass(frozen=True)
class HandoffOptions:
    """A node's part in hand-overs. Names that end in ``_s`` are seconds.

    A node that ``produces`` listens at ``host`` and ``port`` (0: any free one).
    """

    produces: bool
    consumes: bool
    host: str = "127.0.0.1"
    port: int = 0
    lease_s: float = 60.0
    timeout_s: float = 10.0
    peers: tuple[str, ...] = ()


@dataclass
class Results:
    """Request ids since the last step. ``failed`` are in ``received`` too, as vLLM wants it."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class HandoffWorker:
    """Raises ``OSError`` where the address to listen at is taken."""

    def __init__(
        self,
        store: KVStore,
        options: HandoffOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._rows = PrefixRows(store)
        shape = model_shape(store.geometry)
        self._offers = Offers(clock, _GRACE_S)
        self._server = (
            HandoffServer(options.host, options.port, self._offers, self._rows, shape)
            if options.produces
            else None
        )
        self._fetcher = Fetcher(self._rows, shape, options.timeout_s) if options.consumes else None
        self._counts: Counter[str] = Counter()
        self._ended: list[str] = []

    @property
    def address(self) -> HandoffAddress | None:
        if self._server is None:
            return None
        return HandoffAddress(self._options.host, self._server.port)

    @property
    def open_offers(self) -> int:
        return len(self._offers)

    def start_step(self, metadata: HandoffMetadata) -> None:
        for new in metadata.offers:
            expires_s = self._clock() + self._options.lease_s
            self._offers.add(
                Offer(
                    new.request_id,
                    new.ticket,
                    new.token_ids,
                    new.source_blocks,
                    new.indexer_blocks,
                    expires_s,
                )
            )
            self._counts["offered"] += 1
        if self._fetcher is not None:
            for wanted in metadata.fetches:
                self._fetcher.start(wanted)
            for remote in metadata.releases:
                self._fetcher.release(remote)

    def take_results(self) -> Results:
        """Ends leases that have expired, and writes the rows that have arrived."""
        results = Results()
        self._offers.expire()
        for offer, how in self._offers.take_ended():
            self._ended.append(offer.ticket)
            self._counts[how.value] += 1
            if how is Ended.EXPIRED:
                log.warning(
                    "The prefix of %s was not read within %g s; its blocks are free again.",
                    offer.request_id,
                    self._options.lease_s,
                )
        for fetched in self._fetcher.take() if self._fetcher is not None else ():
            results.received.add(fetched.wanted.request_id)
            if fetched.error is None:
                self._write(fetched)
            else:
                results.failed.add(fetched.wanted.request_id)
                self._fail(fetched)
        if self._server is not None:
            self._counts["sent_bytes"] += self._server.take_sent_bytes()
        return results

    def _write(self, fetched: Fetched) -> None:
        wanted = fetched.wanted
        for piece, data in fetched.data:
            of_rows = piece.kind == "rows"
            self._rows.write(
                piece, wanted.source_blocks if of_rows else wanted.indexer_blocks, data
            )
            self._counts["fetched_bytes"] += data.numel()
        self._counts["fetched"] += 1
        self._counts["fetched_tokens"] += wanted.tokens - min(wanted.rows_from, wanted.index_from)

    def _fail(self, fetched: Fetched) -> None:
        wanted = fetched.wanted
        tokens = wanted.tokens - min(wanted.rows_from, wanted.index_from)
        self._counts["failed"] += 1
        self._counts["recomputed_tokens"] += tokens
        log.warning(
            "Request %s: its prefix was not fetched from %s (%s); %d tokens are computed here.",
            wanted.request_id,
            wanted.remote.address,
            fetched.error,
            tokens,
        )

    def take_updates(self) -> HandoffWorkerMetadata | None:
        """What the scheduler does not know yet."""
        counts = {name: count for name, count in self._counts.items() if count}
        ended, self._ended = self._ended, []
        self._counts.clear()
        return HandoffWorkerMetadata(counts, ended) if counts or ended else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fetcher is not None:
            self._fetcher.close()
