"""``kv_transfer_params``: what a router carries from the prefill node to the decode node.

The keys are those of vLLM's own connectors, so that routers made for them work. They come
from a client, so nothing in them is trusted before it was checked here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    """Raises ``ValueError`` that names the key, its value, and what would be right."""
    return RemotePrefix(
        request_id=_text(params, "remote_request_id"),
        host=_text(params, "remote_host"),
        port=_count(params, "remote_port", most=65535),
        ticket=_text(params, "remote_ticket"),
        tokens=_count(params, "remote_num_tokens"),
    )


def require_peer(prefix: RemotePrefix, peers: Sequence[str]) -> None:
    """Only listed prefill nodes are asked; without a list, only those of this machine.

    Clients name the address, so without this rule they could make the node connect anywhere.
    Raises ``ValueError``.
    """
    if prefix.address in peers or (not peers and _is_loopback(prefix.host)):
        return
    allowed = f"one of {', '.join(peers)}" if peers else "an address of this machine"
    raise ValueError(
        f"kv_transfer_params.remote_host: {prefix.address} is not a prefill node of this node; "
        f"{allowed} would be right (disaggregation.peers)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"kv_transfer_params.{key}: {value!r} is not a text")
    return value


def _count(params: Mapping[str, Any], key: str, most: int = 1 << 31) -> int:
    value = params.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"kv_transfer_params.{key}: {value!r} is not a number from 1 to {most}")
    return value
