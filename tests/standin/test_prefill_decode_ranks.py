"""Prefill and decode nodes that differ in size: two decode ranks on one pool, with drafts.

vLLM 0.32 and 0.33 let rank 0 read what goes to the pool that the ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from standin_node import LONG, CudaNode, cuda_files, prompts
from stock_prefill import StockPrefill

from hisparsed.demo.node import free_port

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]
DRAFTS, ANSWER = 2, 12
CARD_BYTES = 27 * 2**20
"""As for drafts on one rank: KV of this model is on every rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[CudaNode]:
    own = {"role": "decode", "port": free_port()}
    files = cuda_files(folder / "decode", ranks=2, drafts=DRAFTS, disaggregation=own)
    served = CudaNode(files, card_bytes=CARD_BYTES)
    try:
        served.wait_until_ready()
        yield served
        assert served.end() == 0, served.log_end()
        served.keep_evidence()
        assert not served.leftovers(), "shared memory is left behind"
    finally:
        served.kill()


@pytest.fixture(scope="module")
def prefill(folder: Path, decode: CudaNode) -> Iterator[StockPrefill]:
    """One rank, and the drafts of the decode node."""
    served = StockPrefill(folder, str(decode.files.document["model"]), drafts=DRAFTS)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.kill()


def fetched(node: CudaNode) -> list[tuple[int, int]]:
    """By rank: bytes that were read into the host pool and onto its card."""
    found = [(one.get("fetched_dram", 0), one.get("fetched_vram", 0)) for one in node.workers()]
    assert len(found) == 2
    return sorted(found)


def handed_over(prefill: StockPrefill, node: CudaNode, prompt: list[int], **changed: Any) -> Any:
    """The tokens of a call that went to both nodes, as a router sends it."""
    params = prefill.prefill(prompt) | changed
    return node.tokens(prompt, ANSWER, kv_transfer_params=params)


def test_two_ranks_with_drafts_decode_what_one_rank_prefilled(
    prefill: StockPrefill, decode: CudaNode
) -> None:
    expected = [prefill.tokens(prompt, ANSWER) for prompt in prompts(0)]
    (idle, _), (reads, _) = fetched(decode)
    assert [handed_over(prefill, decode, prompt) for prompt in prompts(0)] == expected
    (host_of_one, card_of_one), (host, card) = fetched(decode)
    assert host_of_one == idle == 0, "both ranks read into the pool that they share"
    assert host - reads > 3 * LONG * 656
    assert card == card_of_one > 3 * LONG * 132
    assert decode.counter("spec_decode_num_draft_tokens")
    assert not decode.observed().ledger.violations


def test_calls_together_read_imported_rows_from_hot_buffers_and_host(
    prefill: StockPrefill, decode: CudaNode
) -> None:
    expected = [prefill.tokens(prompt, ANSWER) for prompt in prompts(10)]
    before = decode.observed().hot
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda prompt: handed_over(prefill, decode, prompt), prompts(10))
        assert list(answers) == expected
    hot = decode.observed().hot
    assert hot.hits_total > before.hits_total, "no row was read from a hot buffer"
    assert hot.loads_total > before.loads_total, "no row was read from the host pool"
    assert decode.counter("spec_decode_num_accepted_tokens")
    assert not decode.observed().ledger.violations


def test_ranks_that_do_not_divide_are_named_and_computed_here(
    prefill: StockPrefill, decode: CudaNode
) -> None:
    (prompt,) = prompts(30, 1)
    before = fetched(decode)
    assert handed_over(prefill, decode, prompt, tp_size=3) == prefill.tokens(prompt, ANSWER)
    assert fetched(decode) == before
    assert "3 ranks of the prefill node do not fit the 2 of this one" in decode.log()


def test_a_prefill_node_that_dies_costs_two_ranks_the_time_to_compute(
    prefill: StockPrefill, decode: CudaNode, folder: Path
) -> None:
    """And one without drafts, whose rows of the MTP layer would be missing."""
    dead, other = prompts(90, 2)
    expected = [prefill.tokens(prompt, ANSWER) for prompt in (dead, other)]
    params = prefill.prefill(dead)
    prefill.kill()
    assert decode.tokens(dead, ANSWER, kv_transfer_params=params) == expected[0]
    before = fetched(decode)
    (folder / "without").mkdir()
    without = StockPrefill(folder / "without", str(decode.files.document["model"]))
    try:
        without.wait_until_ready()
        assert handed_over(without, decode, other) == expected[1]
    finally:
        without.kill()
    assert fetched(decode) == before
    assert "NIXL compatibility hash mismatch" in decode.log()
    assert decode.life().restarts_total == 0
    assert not decode.observed().ledger.violations
