"""Prefixes that a prefill node keeps for a decode node: until they were read, or their lease ends.

Shared by the engine thread and the threads that serve readers. An offer that has ended is
never read again, so its blocks may be freed as soon as ``take_ended`` names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from hisparsed.engine.reference.handoff.rows import prefix_digest
from hisparsed.engine.reference.handoff.wire import HandoffError


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
    """A decode node has all of it, or said that it needs none of it."""
    EXPIRED = "expired"
    """Nobody came in time."""


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
        """Offers that nobody reads any more, since the last call."""
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
