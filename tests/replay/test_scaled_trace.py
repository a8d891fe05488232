"""Scaling and prompts keep prefix relations; limits clip outputs and drop calls."""

from fractions import Fraction
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.errors import UserError
from hisparsed.replay.plan import parse_duration_s, parse_scale, parse_token_range
from hisparsed.replay.scaled_trace import PromptMaker, TokenRange, scale_trace
from hisparsed.replay.trace import BlockRun, Call, Session, Trace

BLOCK = 64
factors = st.fractions(min_value=Fraction(1, 16), max_value=2, max_denominator=37)


def call(runs: tuple[BlockRun, ...], tail_block: int, tail_tokens: int, output: int = 10) -> Call:
    tokens = BLOCK * sum(run.count for run in runs) + tail_tokens
    return Call(runs, tail_block, max(1, tokens), output, 0.0, None)


def equal_start(a: list[int], b: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(
    factor=factors,
    seed=st.integers(0, 5),
    shared=st.integers(0, 20),
    own=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tails=st.tuples(st.integers(0, BLOCK - 1), st.integers(0, BLOCK - 1)),
)
def test_calls_share_exactly_the_scaled_length_of_their_shared_blocks(
    factor: Fraction, seed: int, shared: int, own: tuple[int, int], tails: tuple[int, int]
) -> None:
    common = (BlockRun(0, shared),) if shared else ()
    calls = tuple(
        call((*common, BlockRun(1000 * (n + 1), own[n])), 9000 + n, tails[n]) for n in (0, 1)
    )
    scaled = scale_trace(Trace("t", BLOCK, (Session("s", calls, 0.0),)), factor)
    # A wide range, so that blocks that differ do so in their first token (but for 1 in 2^31).
    maker = PromptMaker(scaled.scale, seed, TokenRange(0, 2**31))
    a, b = (maker.token_ids(item) for item in scaled.sessions[0].calls)
    assert equal_start(a, b) == int(shared * BLOCK * factor)
    assert [len(a), len(b)] == [max(1, int(item.input_tokens * factor)) for item in calls]


@given(factor=factors, blocks=st.integers(0, 30), more=st.integers(0, 10))
def test_a_longer_call_repeats_every_full_block(factor: Fraction, blocks: int, more: int) -> None:
    shorter = call((BlockRun(7, blocks),) if blocks else (), 8000, 33)
    longer = call((BlockRun(7, blocks + more),) if blocks + more else (), 8001, 0)
    scaled = scale_trace(Trace("t", BLOCK, (Session("s", (shorter, longer), 0.0),)), factor)
    maker = PromptMaker(scaled.scale, 0, TokenRange())
    a, b = (maker.token_ids(item) for item in scaled.sessions[0].calls)
    kept = int(blocks * BLOCK * factor)
    assert a[:kept] == b[:kept]
    assert set(a + b) <= set(range(32, 127))


def test_a_seed_changes_tokens_and_text_has_one_character_a_token() -> None:
    trace = Trace("t", BLOCK, (Session("s", (call((BlockRun(1, 3),), 9, 5),), 0.0),))
    scaled = scale_trace(trace, Fraction(1))
    item = scaled.sessions[0].calls[0]
    makers = [PromptMaker(scaled.scale, seed, TokenRange()) for seed in (0, 1)]
    assert makers[0].token_ids(item) != makers[1].token_ids(item)
    assert [ord(character) for character in makers[0].text(item)] == makers[0].token_ids(item)
    with pytest.raises(UserError, match="0:50 has ids that are no printable"):
        PromptMaker(scaled.scale, 0, TokenRange(0, 50)).text(item)


def test_calls_over_the_limit_are_clipped_or_dropped_and_counted() -> None:
    calls = tuple(call((BlockRun(1, n),), 9, 0, output=20) for n in (1, 2, 3))
    scaled = scale_trace(Trace("t", BLOCK, (Session("s", calls, 0.0),)), Fraction(1), 130)
    kept = scaled.sessions[0].calls
    assert [(item.index, item.input_tokens, item.output_tokens) for item in kept] == [
        (0, 64, 20),
        (1, 128, 2),
    ]
    assert (scaled.clipped, scaled.dropped, scaled.calls) == (1, 1, 2)


def test_a_block_must_keep_a_token() -> None:
    with pytest.raises(UserError, match=r"1/65 leaves a block of 64 tokens .* use 1/64 or more"):
        scale_trace(Trace("t", BLOCK, ()), Fraction(1, 65))


def test_options_are_read_with_their_units() -> None:
    assert [parse_scale(text) for text in ("1/16", "0.25", "2")] == [
        Fraction(1, 16),
        Fraction(1, 4),
        2,
    ]
    texts = ("500ms", "60s", "1.5m", "1h")
    assert [parse_duration_s("--for", text) for text in texts] == [0.5, 60.0, 90.0, 3600.0]
    assert parse_token_range("0:256") == TokenRange(0, 256)


@pytest.mark.parametrize("text", ["0", "-1", "1/0", "x", "", "1e9", "0.0"])
def test_a_wrong_scale_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"--scale: '{text}' is not right"):
        parse_scale(text)


@pytest.mark.parametrize("text", ["60", "0s", "1 day", "-5s"])
def test_a_wrong_duration_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"--for: '{text}' is not right; need a duration"):
        parse_duration_s("--for", text)


@pytest.mark.parametrize("text", ["5", "9:9", "9:3", "a:b"])
def test_a_wrong_token_range_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"{text} is not right|'{text}' is not right"):
        parse_token_range(text)
