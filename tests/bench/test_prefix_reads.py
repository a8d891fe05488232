"""What prompts read of their prefix, on paper: chunks, unions and parts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.replay.trace import BlockRun, Call, Session, Trace
from hisparsed.simulate.workload import openhands_trace
from tests.bench.prefix_reads import (
    EXCHANGE_BYTES_S,
    TABLE,
    follow_ups,
    reads_of,
    table,
    union_rows,
)
from tests.bench.study import with_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "figures" / "study.md"


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description("8xh200-glm-5.3")


def call(blocks: int, tokens: int, first: int = 0) -> Call:
    return Call((BlockRun(first, blocks),), first + blocks, tokens, 100, 0.0, None)


def two(tokens: int) -> Trace:
    """A second call of ``tokens`` that shares 1,000 blocks with the first."""
    calls = (call(1000, 64_000), call(tokens // 64, tokens))
    return Trace("two", 64, (Session("one", calls, 0.0),))


def test_only_later_calls_count_and_their_prefix_is_what_the_call_before_has() -> None:
    assert list(follow_ups(two(70_000))) == [(70_000, 6_000)]
    apart = (call(1000, 64_000), call(1000, 64_000, first=5000))
    assert list(follow_ups(Trace("two", 64, (Session("one", apart, 0.0),)))) == [(64_000, 64_000)]


def test_a_prefix_of_64000_tokens_is_read_in_89_ms_by_every_gpu(h200: NodeDescription) -> None:
    reads = reads_of(h200, two(70_000))
    row_bytes = h200.model.row_bytes * h200.model.layers
    assert reads.read_s == pytest.approx(64_000 * row_bytes / 37e9)
    exchanged_s = 7 / 8 * 64_000 * row_bytes / EXCHANGE_BYTES_S
    assert reads.parts_s == pytest.approx(reads.read_s / 8 + exchanged_s)


def test_each_chunk_reads_again(h200: NodeDescription) -> None:
    """20,000 new tokens are three chunks of 8,192, two of 16,384 and one of 32,768."""
    reads = reads_of(h200, two(84_000))
    row_s = h200.model.row_bytes * h200.model.layers / 37e9
    starts = [64_000, 72_192, 80_384]
    assert reads.read_s == reads.larger_s[0] == pytest.approx(sum(starts) * row_s)
    assert reads.larger_s[1] == pytest.approx((64_000 + 80_384) * row_s)
    assert reads.larger_s[2] == pytest.approx(64_000 * row_s)


def test_the_union_goes_on_as_it_ends(h200: NodeDescription) -> None:
    union, topk = h200.rows.union, h200.model.topk
    assert [union_rows(h200, count + 1) for count in range(4)] == [topk * one for one in union]
    ratio = union_rows(h200, 400) / union_rows(h200, 300)
    assert ratio == pytest.approx(union[3] / union[2])
    # What is selected is never more than there is.
    assert reads_of(h200, two(90_000)).selected_s <= reads_of(h200, two(90_000)).read_s


def test_the_document_has_the_row_that_the_command_makes(h200: NodeDescription) -> None:
    text = DOCUMENT.read_text("utf-8")
    made = table(h200, {"openhands": openhands_trace()})
    assert made.strip().splitlines()[-1] in text
    assert with_table(text, TABLE, "\n")
