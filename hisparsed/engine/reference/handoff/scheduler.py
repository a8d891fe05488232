"""The scheduler's half of the hand-over: which prefix is offered, which one is fetched.

Runs on the engine thread inside vLLM's scheduler. Moves no bytes and opens no sockets.

``kv_transfer_params`` are what a router carries from the prefill node to the decode node. Their
keys are those of vLLM's own connectors, so that routers made for them work. They come from a
client, so all of them are checked here. The messages between scheduler and worker in every step are
here too.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hisparsed.engine.reference.handoff.transfer import prefix_digest
from hisparsed.engine.reference.requests import RequestTables
from hisparsed.engine.remote_prefix import count_param, require_peer, text_param


@dataclass(frozen=True)
class RemotePrefix:
    """Where a prefix waits to be fetched. ``ticket`` is the right to read it."""

    request_id: str
    host: str
    port: int
    ticket: str
    tokens: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def offer_params(
    prefix: RemotePrefix, engine_id: str, block_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The answer of a prefill node. ``block_ids`` are for routers that count blocks."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": prefix.request_id,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_host": prefix.host,
        "remote_port": prefix.port,
        "remote_num_tokens": prefix.tokens,
        "remote_ticket": prefix.ticket,
        "tp_size": 1,
    }


def parse_remote_prefix(params: Mapping[str, Any]) -> RemotePrefix:
    """Raises ``ValueError`` that names the key, its value, and the expected value."""
    return RemotePrefix(
        request_id=text_param(params, "remote_request_id"),
        host=text_param(params, "remote_host"),
        port=count_param(params, "remote_port", 65535),
        ticket=text_param(params, "remote_ticket"),
        tokens=count_param(params, "remote_num_tokens"),
    )


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


log = logging.getLogger("hisparsed.engine")

_SERVED_ENDS = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
_SOURCE, _INDEXER = RequestTables.SOURCE_GROUP, RequestTables.INDEXER_GROUP


class HandoffScheduler:
    """``produces`` and ``consumes`` are the node's roles; ``peers`` as ``require_peer`` has it."""

    def __init__(
        self,
        *,
        produces: bool,
        consumes: bool,
        engine_id: str,
        peers: Sequence[str],
        block_size: int,
    ) -> None:
        self._produces = produces
        self._consumes = consumes
        self._engine_id = engine_id
        self._peers = tuple(peers)
        self._block_size = block_size
        self._address: HandoffAddress | None = None
        self._remote: dict[str, RemotePrefix] = {}
        """Calls whose prefix waits elsewhere and was neither asked for nor released yet."""
        self._pools: tuple[Any, Any] | None = None
        self._held: dict[str, list[Any]] = {}
        """By ticket, GPU blocks of each open offer; the host pool keeps the others."""
        self._next = HandoffMetadata()
        self._counts: Counter[str] = Counter()

    def listen_at(self, address: HandoffAddress) -> None:
        self._address = address

    def hold_blocks_of(self, host_pool: Any, gpu_pool: Any) -> None:
        """Pools of the sparse-MLA pages (``CountingHostPool``) and of the indexer pages."""
        self._pools = (host_pool, gpu_pool)

    def request_added(self, request: Any) -> None:
        """Checks the parameters once; the prompt of a call with wrong ones is computed here."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not self._produces:
            log.warning(
                "Request %s is served whole: it asks for do_remote_decode, and this node's "
                "disaggregation.role is decode.",
                request.request_id,
            )
        if not params.get("do_remote_prefill"):
            return
        try:
            if not self._consumes:
                raise ValueError(
                    "kv_transfer_params.do_remote_prefill: this node's disaggregation.role is "
                    "prefill; send the call to a decode node"
                )
            remote = parse_remote_prefix(params)
            require_peer(remote.host, remote.port, self._peers)
        except ValueError as error:
            self._counts["refused"] += 1
            log.warning("Request %s is computed here: %s", request.request_id, error)
            return
        self._remote[request.request_id] = remote

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """Tokens that can come from elsewhere beyond the ``computed_tokens`` held here."""
        remote = self._remote.get(request.request_id)
        if remote is None:
            return 0
        return max(0, min(remote.tokens, int(request.num_prompt_tokens)) - computed_tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks exist: fetch into them, or release the prefix where none of it is needed."""
        remote = self._remote.pop(request.request_id, None)
        if remote is None:
            return
        if external_tokens <= 0:
            self._next.releases.append(remote)
            return
        tokens = min(remote.tokens, int(request.num_prompt_tokens))
        source, indexer = blocks.blocks[_SOURCE], blocks.blocks[_INDEXER]
        self._next.fetches.append(
            Wanted(
                request_id=request.request_id,
                remote=remote,
                tokens=tokens,
                digest=prefix_digest(request.prompt_token_ids[:tokens]),
                rows_from=self._tokens_here(source, tokens),
                index_from=self._tokens_here(indexer, tokens),
                source_blocks=tuple(block.block_id for block in source),
                indexer_blocks=tuple(block.block_id for block in indexer),
            )
        )

    def _tokens_here(self, blocks: Sequence[Any], tokens: int) -> int:
        """Tokens whose rows this node has. Published blocks may be others' too: never written.

        The pools differ: the host pool often still holds what the GPU has lost.
        """
        held = 0
        for block in blocks:
            if block.block_hash is None:
                break
            held += self._block_size
        return min(held, tokens)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """What the answer of ``request`` has for the router: an offer of its prompt, or nothing."""
        params = request.kv_transfer_params or {}
        unused = self._remote.pop(request.request_id, None)
        if unused is not None:
            self._next.releases.append(unused)
        if not self._produces or not params.get("do_remote_decode"):
            return None
        tokens = min(int(request.num_computed_tokens), int(request.num_prompt_tokens))
        if request.status.name not in _SERVED_ENDS or tokens < 1:
            return None
        if self._address is None:
            raise RuntimeError("the worker has not said where it listens")
        offer = NewOffer(
            request_id=request.request_id,
            ticket=secrets.token_hex(16),
            token_ids=tuple(request.prompt_token_ids[:tokens]),
            source_blocks=tuple(block_ids[_SOURCE]),
            indexer_blocks=tuple(block_ids[_INDEXER]),
        )
        self._hold(offer)
        self._next.offers.append(offer)
        prefix = RemotePrefix(
            offer.request_id, self._address.host, self._address.port, offer.ticket, tokens
        )
        groups = (offer.source_blocks, offer.indexer_blocks)
        return offer_params(prefix, self._engine_id, groups)

    def _hold(self, offer: NewOffer) -> None:
        """Keep only the blocks that are read, not those of the request: its resident pages and hot
        buffer are most of its GPU memory, and offers that wait would starve the calls that run."""
        host_pool, gpu_pool = self._require_pools()
        gpu = [gpu_pool.blocks[block] for block in offer.indexer_blocks]
        gpu_pool.touch(gpu)
        host_pool.hold_for(offer.ticket, offer.source_blocks)
        self._held[offer.ticket] = gpu

    def _let_go(self, ticket: str) -> None:
        host_pool, gpu_pool = self._require_pools()
        host_pool.let_go(ticket)
        gpu_pool.free_blocks(reversed(self._held.pop(ticket)))

    def _require_pools(self) -> tuple[Any, Any]:
        if self._pools is None:
            raise RuntimeError("vLLM has not bound its cache manager to the connector")
        return self._pools

    def take_metadata(self) -> HandoffMetadata:
        metadata, self._next = self._next, HandoffMetadata()
        return metadata

    def has_work(self) -> bool:
        """Whether the engine must step although no call runs: to notify the worker, or to learn of
        offers that have ended.
        """
        return bool(self._next or self._held)

    def receive(self, updates: HandoffWorkerMetadata) -> None:
        self._counts.update(updates.counts)
        for ticket in updates.ended:
            self._let_go(ticket)

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = dict(self._counts), Counter()
        return counts
