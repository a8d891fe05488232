"""The worker's half of the hand-over: offers kept, prefixes fetched and written, all counted.

Called once a step on the engine thread, which alone writes into the pools. Sockets and
threads are the server's and the fetcher's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hisparsed.engine.reference.handoff.fetch import Fetched, Fetcher
from hisparsed.engine.reference.handoff.messages import (
    HandoffAddress,
    HandoffMetadata,
    HandoffWorkerMetadata,
)
from hisparsed.engine.reference.handoff.offers import Ended, Offer, Offers
from hisparsed.engine.reference.handoff.rows import PrefixRows, model_shape
from hisparsed.engine.reference.handoff.server import HandoffServer
from hisparsed.engine.reference.store import KVStore

log = logging.getLogger("hisparsed.engine")

_GRACE_S = 1.0


@dataclass(frozen=True)
class HandoffOptions:
    """A node's part in hand-overs. Seconds where the name says so.

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
        """Ends leases that are over, and writes what has arrived."""
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

    def take_news(self) -> HandoffWorkerMetadata | None:
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
