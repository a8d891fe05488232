"""The check of what a call says about a remote prefix, before vLLM's NIXL acts on it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hisparsed.engine.remote_prefix import NixlPrefixes

WHOLE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4, 5]],
    "remote_engine_id": "an-engine",
    "remote_request_id": "a-call",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 150,
    "tp_size": 2,
}
"""As vLLM's producer answers a prompt of 150 tokens, three blocks of 64."""


def looked_at(
    params: dict[str, Any] | None,
    *,
    peers: tuple[str, ...] = (),
    lookahead: int = 0,
    ranks: int = 4,
) -> dict[str, Any] | None:
    """The parameters that vLLM gets to see."""
    request = SimpleNamespace(request_id="r", num_prompt_tokens=150, kv_transfer_params=params)
    NixlPrefixes(peers, 64, lookahead, ranks=ranks).look(request)
    return request.kv_transfer_params  # type: ignore[no-any-return]


@pytest.mark.parametrize("params", [None, {}, WHOLE, WHOLE | {"dcp_size": 1, "pp_size": 1}])
def test_what_can_be_fetched_goes_on_unchanged(params: dict[str, Any] | None) -> None:
    assert looked_at(params) is params


def test_parameters_of_other_connectors_are_not_looked_at() -> None:
    other = {"load_tiers": [{"medium": 5}]}
    assert looked_at(other) is other


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"remote_host": "10.0.0.1"}, "10.0.0.1:5600 is not a prefill node of this node"),
        ({"remote_host": 5}, "remote_host: 5 is not a text"),
        ({"remote_port": 0}, "remote_port: 0 is not a number from 1 to 65535"),
        ({"remote_engine_id": None}, "remote_engine_id: None is not a text"),
        ({"remote_request_id": ""}, "remote_request_id: '' is not a text"),
        ({"tp_size": "2"}, "tp_size: '2' is not a number from 1 to 1024"),
        ({"pp_size": 10**9}, "pp_size: 1000000000 is not a number"),
        ({"pp_size": 2}, "pp_size: 2; each rank of the prefill node must have all layers"),
        ({"tp_size": 3}, "3 ranks of the prefill node do not fit the 4 of this one"),
        ({"tp_size": 6}, "6 ranks of the prefill node do not fit the 4 of this one"),
        ({"remote_num_tokens": 149}, "149 are not all of a prompt of 150"),
        ({"remote_num_tokens": True}, "remote_num_tokens: True is not a number"),
        ({"remote_block_ids": None}, "this is not a list of lists"),
        ({"remote_block_ids": [[1, 2, 3], 4]}, "these are no block numbers"),
        ({"remote_block_ids": [[1, 2, -3]]}, "these are no block numbers"),
        ({"remote_block_ids": [[1, 2]]}, "2 blocks do not hold a prompt of 150 tokens; 3 of 64"),
        ({"do_remote_prefill": False, "do_remote_decode": True}, "send the call to a prefill node"),
    ],
)
def test_what_cannot_is_computed_here_and_says_why(
    changed: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hisparsed.engine"):
        assert looked_at(WHOLE | changed) is None
    assert why in caplog.text


@pytest.mark.parametrize(("theirs", "ours"), [(1, 8), (8, 1), (2, 4), (3, 3), (6, 3)])
def test_one_node_s_ranks_are_a_multiple_of_the_other_s(theirs: int, ours: int) -> None:
    assert looked_at(WHOLE | {"tp_size": theirs}, ranks=ours) is not None


def test_listed_peers_are_the_only_ones() -> None:
    assert looked_at(WHOLE, peers=("127.0.0.1:5600",)) is WHOLE
    assert looked_at(WHOLE, peers=("127.0.0.1:5601",)) is None


def test_a_prefill_node_may_leave_what_drafts_look_ahead_at() -> None:
    assert looked_at(WHOLE | {"remote_num_tokens": 148}, lookahead=2) is not None
    assert looked_at(WHOLE | {"remote_num_tokens": 147}, lookahead=2) is None
