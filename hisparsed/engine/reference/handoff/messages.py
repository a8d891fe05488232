"""What the two halves of the hand-over connector tell each other, a step at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hisparsed.engine.reference.handoff.fetch import Wanted
from hisparsed.engine.reference.handoff.params import RemotePrefix


@dataclass(frozen=True)
class NewOffer:
    """A finished prompt to keep for a decode node. The scheduler holds its blocks meanwhile."""

    request_id: str
    ticket: str
    token_ids: tuple[int, ...]
    source_blocks: tuple[int, ...]
    indexer_blocks: tuple[int, ...]


@dataclass
class HandoffMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the worker: what to offer, fetch and release from this step on."""

    offers: list[NewOffer] = field(default_factory=list)
    fetches: list[Wanted] = field(default_factory=list)
    releases: list[RemotePrefix] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.offers or self.fetches or self.releases)


@dataclass
class HandoffWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker to the scheduler: counts since the last step, and tickets of offers that
    have ended and are not read any more."""

    counts: dict[str, int]
    ended: list[str] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HandoffWorkerMetadata:
        total = Counter(self.counts)
        total.update(other.counts)
        return HandoffWorkerMetadata(dict(total), [*self.ended, *other.ended])


@dataclass
class HandoffAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where the worker listens, for the parameters that the scheduler writes."""

    host: str
    port: int


def address_from(metadata: Any) -> HandoffAddress:
    """The one worker's address out of vLLM's handshake table. Raises ``ValueError``."""
    (found,) = metadata.values()
    if not isinstance(found, HandoffAddress):
        raise TypeError(f"the worker's address is a {type(found).__name__}, not a HandoffAddress")
    return found
