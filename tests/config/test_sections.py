"""The `disaggregation` section: what each role may say, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparsed.config.node import load_node_config
from hisparsed.policy.problems import ConfigError, key_text

MEMORY = 2**40


def problems(folder: Path, text: str) -> list[tuple[str, str]]:
    """Key and sentence of each problem."""
    path = folder / "node.yaml"
    path.write_text(f"host_budget: 1GiB\n{text}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_node_config(path, memory_bytes=MEMORY)
    return [(key_text(one.key), f"{one.message}; {one.hint}") for one in caught.value.problems]


def test_a_node_does_both_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("host_budget: 1GiB\n", "utf-8")
    assert load_node_config(path, memory_bytes=MEMORY).value.disaggregation is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{role: prefill, host: 10.0.0.1, port: 5, lease: 2m}",
            ("prefill", "10.0.0.1", 5, 120.0, 10.0, ()),
        ),
        (
            "{role: decode, timeout: 500ms, peers: ['10.0.0.1:5']}",
            ("decode", "127.0.0.1", 14579, 60.0, 0.5, ("10.0.0.1:5",)),
        ),
    ],
)
def test_each_role_has_its_own_keys(
    tmp_path: Path, text: str, expected: tuple[object, ...]
) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(f"host_budget: 1GiB\nnode: reference\ndisaggregation: {text}\n", "utf-8")
    own = load_node_config(path, memory_bytes=MEMORY).value.disaggregation
    assert own is not None
    assert (own.role, own.host, own.port, own.lease, own.timeout, own.peers) == expected


@pytest.mark.parametrize(
    ("text", "key", "sentence"),
    [
        (
            "{role: decode, lease: 5s}",
            "disaggregation.lease",
            "has no meaning on a decode node; remove it, or set role: prefill",
        ),
        (
            "{role: prefill, peers: []}",
            "disaggregation.peers",
            "has no meaning on a prefill node; remove it, or set role: decode",
        ),
        (
            "{role: decode, port: 5}\nnode: reference",
            "disaggregation.port",
            "has no meaning on a reference node that decodes; remove it",
        ),
        (
            "{role: prefill, nixl: {backends: [UCX]}}\nnode: reference",
            "disaggregation.nixl",
            "has no meaning on a reference node; remove it",
        ),
        (
            "{role: decode, timeout: 5s}\nnode: cuda\nmodel: m",
            "disaggregation.timeout",
            "has no meaning on a cuda node that decodes; remove it",
        ),
        (
            "{role: prefill}\nnode: cuda\nmodel: m",
            "disaggregation.role",
            '"prefill" cannot be on a cuda node: vLLM\'s NIXL reads from no node that keeps KV in '
            "host memory; prefill with vllm serve without HiSparse",
        ),
        ("{role: both}", "disaggregation.role", "prefill"),
        ("{role: decode, peers: [nowhere]}", "disaggregation.peers[0]", ""),
        ("{role: decode, timeout: 0s}", "disaggregation.timeout", ""),
    ],
)
def test_what_has_no_meaning_is_refused_where_it_stands(
    tmp_path: Path, text: str, key: str, sentence: str
) -> None:
    ((found_key, found),) = problems(tmp_path, f"disaggregation: {text}")
    assert found_key == key
    assert sentence in found


def test_a_decode_node_on_cuda_listens_and_hands_options_to_nixl(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    text = "{role: decode, host: 10.0.0.2, port: 5600, nixl: {backends: [LIBFABRIC]}}"
    path.write_text(f"host_budget: 1GiB\nnode: cuda\nmodel: m\ndisaggregation: {text}\n", "utf-8")
    own = load_node_config(path, memory_bytes=MEMORY).value.disaggregation
    assert own is not None
    assert (own.host, own.port, own.nixl) == ("10.0.0.2", 5600, {"backends": ["LIBFABRIC"]})


def test_only_a_node_that_computes_kv_can_hand_it_over(tmp_path: Path) -> None:
    ((key, sentence),) = problems(tmp_path, "node: simulated\ndisaggregation: {role: decode}")
    assert key == "disaggregation"
    assert "a simulated node does not hand over prefixes in this version" in sentence
