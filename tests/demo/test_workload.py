"""What the demo sends follows from node, seed and speed, and is the same work at every speed."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hisparsed.demo.node import MODELS, START_REACH_TOKENS, DemoSettings
from hisparsed.demo.workload import (
    SESSION_CALLS,
    TOKENS_A_CALL,
    TOKENS_AN_OUTPUT,
    Workload,
    calls_within,
    make_workload,
    work_of,
)
from hisparsed.engine.reference.model_folder import ROW_BYTES
from hisparsed.errors import UserError
from hisparsed.policy.units import parse_bytes
from hisparsed.replay.scaled_trace import Scale, ScaledCall, ScaledSession, live_sets
from hisparsed.replay.trace import BlockRun, Trace, block_ids, load_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace()


def workload_of(trace: Trace, load: float = 1.5, concurrency: int | None = None) -> Workload:
    return make_workload(
        trace,
        reach_tokens=START_REACH_TOKENS,
        max_model_len=DemoSettings().max_model_len,
        seed=0,
        load=load,
        concurrency=concurrency,
    )


@pytest.fixture(scope="module")
def usual(trace: Trace) -> Workload:
    return workload_of(trace)


def test_the_load_is_what_was_asked_for(trace: Trace, usual: Workload) -> None:
    assert 1.4 <= usual.load <= 1.6
    assert workload_of(trace, 0.7).load == pytest.approx(0.7, abs=0.1)


def test_the_load_stays_however_many_calls_there_are(usual: Workload) -> None:
    for calls in (80, 400, 1200):
        sizes = live_sets(usual.after_first(calls), usual.scale, usual.concurrency)
        full = sizes[: -2 * SESSION_CALLS] if calls > 80 else sizes[:3]
        assert 1.3 < sum(full) / len(full) / usual.reach_tokens < 1.7


def test_sessions_at_a_time_overrule_the_load(trace: Trace) -> None:
    few = workload_of(trace, concurrency=3)
    assert few.concurrency == 3
    assert few.load < 0.5


def test_a_load_that_the_trace_does_not_have_is_refused(trace: Trace) -> None:
    with pytest.raises(UserError, match="--load: 50"):
        workload_of(trace, 50.0)


def test_the_first_calls_and_those_after_are_the_sessions_in_order(usual: Workload) -> None:
    first, after = usual.first_calls, usual.after_first(100)
    assert len(first) == usual.concurrency
    assert [len(one.calls) for one in first] == [1] * len(first)
    assert sum(len(one.calls) for one in after) == 100
    sent = {one.id: one.calls for one in first}
    for one in after:
        calls = (*sent.get(one.id, ()), *one.calls)
        assert [call.index for call in calls] == list(range(len(calls)))


def test_another_pass_repeats_the_lengths_and_no_prompt(usual: Workload) -> None:
    size = 63
    one, again = usual.sessions[0], usual.sessions[size]
    assert again.id != one.id
    assert [call.input_tokens for call in again.calls] == [call.input_tokens for call in one.calls]
    ids = {block for s in usual.sessions[:size] for c in s.calls for block in block_ids(c.blocks)}
    assert not ids & {block for call in again.calls for block in block_ids(call.blocks)}


def test_more_time_or_a_faster_machine_is_more_calls(usual: Workload) -> None:
    counts = [calls_within(usual, work) for work in (0, 20_000, 50_000, 500_000)]
    assert counts[0] == 0
    assert counts == sorted(set(counts))


def call(index: int, blocks: int) -> ScaledCall:
    return ScaledCall(index, (BlockRun(0, blocks),), 1000 + index, 10 * blocks + 5, 2, 0.0)


def test_what_calls_cost_counts_only_what_is_not_held() -> None:
    session = ScaledSession("a", tuple(call(index, 3 + index) for index in range(3)), 0.0)
    ample = Workload((session,), Scale(Fraction(1), 10), 1, 0, 1000)
    beside = TOKENS_A_CALL + 2 * TOKENS_AN_OUTPUT
    assert work_of(session.calls[:1]) == 35 + beside
    # The second call finds 3 blocks of the first and computes a block and a tail.
    assert calls_within(ample, 15 + beside) == 1
    assert calls_within(ample, 15 + beside - 1) == 0
    nothing_held = Workload((session,), Scale(Fraction(1), 10), 1, 0, 1)
    assert calls_within(nothing_held, 15 + beside) == 0
    assert calls_within(nothing_held, 45 + beside) == 1


@pytest.mark.parametrize("name", MODELS)
def test_both_models_reach_as_far(name: str) -> None:
    settings = MODELS[name]
    block_bytes = settings.layers * ROW_BYTES * 16
    blocks = parse_bytes(settings.host_budget) // block_bytes
    assert blocks * 3 // 4 * 16 == START_REACH_TOKENS
