"""Checks ``kv_transfer_params`` of a call: the place of a prefix that waits on another node.

A router carries them from the prefill node's answer to the decode node, but every client of the API
can write them. So nothing in them is trusted: the address must be one of ``peers``, and on a CUDA
node, whose NIXL workers end with an error over a wrong form or too few blocks, all the rest is
checked before vLLM sees it. Pure; imports no vLLM.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger("hisparsed.engine")

_MOST_RANKS = 1024


def require_peer(host: str, port: int, peers: Sequence[str]) -> None:
    """Only listed prefill nodes are asked; without a list, only those of this machine.

    Clients name the address, so without this rule they could make the node connect anywhere.
    Raises ``ValueError``.
    """
    address = f"{host}:{port}"
    if address in peers or (not peers and _is_loopback(host)):
        return
    allowed = f"one of {', '.join(peers)}" if peers else "an address of this machine"
    raise ValueError(
        f"kv_transfer_params.remote_host: {address} is not a prefill node of this node; "
        f"use {allowed} (disaggregation.peers)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def text_param(params: Mapping[str, Any], key: str) -> str:
    """Raises ``ValueError`` that names the key, its value, and the expected value; as do the
    others."""
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"kv_transfer_params.{key}: {value!r} is not a text")
    return value


def count_param(
    params: Mapping[str, Any], key: str, most: int = 1 << 31, *, default: int | None = None
) -> int:
    """``default``: where the key may be omitted."""
    value = params.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"kv_transfer_params.{key}: {value!r} is not a number from 1 to {most}")
    return value


class NixlPrefixes:
    """Rejects parameters that vLLM's NIXL cannot fetch. ``lookahead_tokens``: of a prompt's last
    tokens, those that the prefill node leaves to this one. ``ranks``: tensor-parallel ranks of this
    node.
    """

    def __init__(
        self, peers: Sequence[str], block_tokens: int, lookahead_tokens: int, *, ranks: int
    ) -> None:
        self._peers = tuple(peers)
        self._ranks = ranks
        self._block_tokens = block_tokens
        self._lookahead_tokens = lookahead_tokens

    def look(self, request: Any) -> None:
        """Removes the parameters from a call that cannot be fetched: its prompt is computed
        here."""
        params = request.kv_transfer_params or {}
        fetches = params.get("do_remote_prefill")
        if not fetches and not params.get("do_remote_decode"):
            return
        try:
            if not fetches:
                raise ValueError(
                    "kv_transfer_params.do_remote_decode: this node's disaggregation.role is "
                    "decode; send the call to a prefill node first"
                )
            self._require_whole(params, int(request.num_prompt_tokens))
        except ValueError as error:
            log.warning("Request %s is computed here: %s", request.request_id, error)
            request.kv_transfer_params = None

    def _require_whole(self, params: Mapping[str, Any], prompt_tokens: int) -> None:
        host = text_param(params, "remote_host")
        require_peer(host, count_param(params, "remote_port", 65535), self._peers)
        for key in ("remote_engine_id", "remote_request_id"):
            text_param(params, key)
        count_param(params, "dcp_size", _MOST_RANKS, default=1)
        self._require_layout(
            count_param(params, "tp_size", _MOST_RANKS),
            count_param(params, "pp_size", _MOST_RANKS, default=1),
        )
        least = prompt_tokens - self._lookahead_tokens
        tokens = count_param(params, "remote_num_tokens")
        if tokens < least:
            raise ValueError(
                f"kv_transfer_params.remote_num_tokens: {tokens} are not all of a prompt of "
                f"{prompt_tokens}; send the prefill node's answer to the same prompt"
            )
        groups = params.get("remote_block_ids")
        if not isinstance(groups, list | tuple) or not groups:
            raise ValueError("kv_transfer_params.remote_block_ids: this is not a list of lists")
        blocks = -(-least // self._block_tokens)
        for group in groups:
            if not isinstance(group, list | tuple) or not all(map(_is_block, group)):
                raise ValueError("kv_transfer_params.remote_block_ids: these are no block numbers")
            if len(group) < blocks:
                raise ValueError(
                    f"kv_transfer_params.remote_block_ids: {len(group)} blocks do not hold a "
                    f"prompt of {prompt_tokens} tokens; {blocks} of {self._block_tokens} would"
                )

    def _require_layout(self, ranks: int, stages: int) -> None:
        """Of the prefill node. vLLM would break off each handshake with an assertion."""
        if max(ranks, self._ranks) % min(ranks, self._ranks):
            raise ValueError(
                f"kv_transfer_params.tp_size: {ranks} ranks of the prefill node do not fit the "
                f"{self._ranks} of this one; one must be a multiple of the other"
            )
        if stages > 1:
            raise ValueError(
                f"kv_transfer_params.pp_size: {stages}; each rank of the prefill node must have "
                "all layers"
            )


def _is_block(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
