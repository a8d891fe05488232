"""A CUDA node decodes what `vllm serve` has prefilled, through vLLM's own NixlConnector.

One rank each, on stand-ins. NIXL's agent is one that copies between processes; all else of the way
is vLLM's: handshake, registration, descriptors, reads into host pool and GPU, notifications.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin_node import ANSWER, CARD_BYTES, LONG, CudaNode, cuda_files, prompts
from stock_prefill import StockPrefill

from hisparsed.demo.node import free_port

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disaggregated")


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[CudaNode]:
    own = {"role": "decode", "port": free_port()}
    served = CudaNode(
        cuda_files(folder / "decode", ranks=1, disaggregation=own), card_bytes=CARD_BYTES
    )
    try:
        served.wait_until_ready()
        yield served
        assert served.end() == 0, served.log_end()
        served.assert_nothing_left()
        served.keep_evidence()
    finally:
        served.kill()


@pytest.fixture(scope="module")
def prefill(folder: Path, decode: CudaNode) -> Iterator[StockPrefill]:
    served = StockPrefill(folder, str(decode.files.document["model"]))
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.kill()


def fetched(node: CudaNode) -> tuple[int, int]:
    """Bytes that were read into the host pool and onto the card."""
    (worker,) = node.workers()
    return worker.get("fetched_dram", 0), worker.get("fetched_vram", 0)


def handed_over(prefill: StockPrefill, node: CudaNode, prompt: list[int], **changed: Any) -> Any:
    """The tokens of a call that went to both nodes, as a router sends it."""
    params = prefill.prefill(prompt) | changed
    return node.tokens(prompt, ANSWER, kv_transfer_params=params)


def test_tokens_are_those_of_one_node_while_the_split_moves(
    prefill: StockPrefill, decode: CudaNode
) -> None:
    lent = set()
    for first, share in ((0, "40%"), (3, "20%"), (6, "50%")):
        decode.operate("/v1/policy/set", key="pools.offload.start", value=share, for_s=600)
        before, hits = fetched(decode), decode.external_hits()
        for prompt in prompts(first):
            assert handed_over(prefill, decode, prompt) == prefill.tokens(prompt, ANSWER)
        host, card = (now - then for now, then in zip(fetched(decode), before, strict=True))
        assert host > 3 * LONG * 656
        assert card > 3 * LONG * 132
        assert decode.external_hits() - hits >= 3 * (LONG - 64)
        observed = decode.observed()
        assert not observed.ledger.violations
        lent.add(observed.offload.lent_blocks)
    assert len(lent) == 3, f"the split did not move: {lent}"


def test_two_prefill_ranks_are_one_to_a_decode_node_of_one(
    prefill: StockPrefill, decode: CudaNode, folder: Path
) -> None:
    expected = [prefill.tokens(prompt, ANSWER) for prompt in prompts(60)]
    (folder / "two").mkdir()
    two = StockPrefill(folder / "two", str(decode.files.document["model"]), ranks=2)
    try:
        two.wait_until_ready()
        before = fetched(decode)
        assert [handed_over(two, decode, prompt) for prompt in prompts(60)] == expected
        host, card = (now - then for now, then in zip(fetched(decode), before, strict=True))
        assert 3 * LONG * 656 < host < 3 * (LONG + 64) * 656 * 6
        assert card > 3 * LONG * 132
    finally:
        two.kill()


def test_only_what_is_not_held_is_fetched(prefill: StockPrefill, decode: CudaNode) -> None:
    prompt = prompts(20, 1)[0]
    decode.tokens(prompt[:320], 1)
    before = fetched(decode)
    assert handed_over(prefill, decode, prompt) == prefill.tokens(prompt, ANSWER)
    assert fetched(decode)[0] - before[0] < LONG * 656 * 6


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"remote_host": "192.0.2.1"}, "is not a prefill node of this node"),
        ({"remote_block_ids": [[1, 2]]}, "2 blocks do not hold"),
        ({"remote_num_tokens": 64}, "64 are not all of a prompt of 620"),
    ],
)
def test_what_cannot_be_fetched_is_computed_here(
    prefill: StockPrefill, decode: CudaNode, changed: dict[str, Any], why: str
) -> None:
    prompt = prompts(40 + len(why), 1)[0]
    before = fetched(decode)
    assert handed_over(prefill, decode, prompt, **changed) == prefill.tokens(prompt, ANSWER)
    assert fetched(decode) == before
    assert why in decode.log()
    assert decode.life().restarts_total == 0


def test_a_prefill_node_that_dies_costs_the_time_to_compute(
    prefill: StockPrefill, decode: CudaNode
) -> None:
    """The last test: nothing prefills after it."""
    known, unknown = prompts(90, 2)
    expected = [prefill.tokens(prompt, ANSWER) for prompt in (known, unknown)]
    params = [prefill.prefill(prompt) for prompt in (known, unknown)]
    params[1]["remote_engine_id"] = "another"
    prefill.kill()
    for prompt, tokens, asked in zip((known, unknown), expected, params, strict=True):
        assert decode.tokens(prompt, ANSWER, kv_transfer_params=asked) == tokens
    assert decode.life().restarts_total == 0, "a failed fetch ended the engine"
    assert decode.workers()[0]["unread"] == 2, "one read each, of host rows and of a card's"
    assert not decode.observed().ledger.violations
