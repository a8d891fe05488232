"""Percentiles, texts, arrivals, the choice of sessions and the size figures."""

import gzip
import json
from collections.abc import Callable
from fractions import Fraction
from io import StringIO
from pathlib import Path

import pytest

from hisparsed.errors import UserError
from hisparsed.replay.command import PlainLines
from hisparsed.replay.plan import (
    ReplayPlan,
    choose_sessions,
    limit_calls,
    poisson_arrivals,
    recorded_arrivals,
)
from hisparsed.replay.results import CallResult, ReplayResult, percentile, summarise
from hisparsed.replay.runner import ReplayProgress
from hisparsed.replay.scaled_trace import Scale, ScaledCall, ScaledSession, ScaledTrace, figures
from hisparsed.replay.trace import BlockRun


def answered(ttft_s: float, error: str | None = None) -> CallResult:
    first = None if error else ttft_s
    return CallResult(
        "s", 0, error, "why", 0.0, 1.0, first, (0.5,), 10, 2, None, 1, 0.5, "d", "tokens"
    )


def test_percentiles_interpolate() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 4.6, 5.0]
    assert percentile([7.0], 0.99) == 7.0


def test_the_text_names_what_went_wrong() -> None:
    calls = (answered(1.0), answered(3.0), answered(0.0, "http_400"))
    summary = summarise(ReplayResult(calls, 36.0, "time_up", 2, 1, 0, None))
    text = summary.to_text()
    for part in (
        "Replayed 2 calls in 36.0 s, until its time was up: 200 calls per hour",
        "20 in, 4 out; prefix hits: not reported",
        "p50 2.000 s",
        "Failed: 1 (1 http_400); the first: http_400 why",
        "Cut off while in flight: 2",
        "Sent again: 3 times, 1.5 s",
        "1 with a shortened output, 0 skipped",
    ):
        assert part in text
    assert "Preemptions" not in text
    assert json.loads(json.dumps(summary.to_dict()))["ttft_s"]["max"] == 3.0


def test_a_replay_without_an_answer_has_no_percentiles() -> None:
    summary = summarise(ReplayResult((), 0.0, "interrupted", 0, 0, 0, 0))
    assert (summary.ttft_s, summary.requests_per_hour) == (None, 0.0)
    assert "not measured" in summary.to_text()


def test_plain_lines_come_now_and_then() -> None:
    out = StringIO()
    lines = PlainLines(out)
    for done, seconds in ((1, 1.0), (2, 5.0), (3, 11.5), (4, 12.0), (5, 13.0)):
        lines(ReplayProgress(done, 0, 5, 0, 1000, 20, seconds, answered(1.0)))
    assert [line.split(" ")[0] for line in out.getvalue().splitlines()] == ["1/5", "3/5", "5/5"]


def test_recorded_arrivals_start_at_zero_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    rows = "2023-11-16 18:15:50.9951690,1\n2023-11-16 18:15:46.6805900,1\n"
    path.write_bytes(gzip.compress(f"TIMESTAMP,ContextTokens\n{rows}".encode()))
    assert recorded_arrivals(path) == pytest.approx((0.0, 4.314579), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("WHEN,N\n1,2\n", "line 1: the columns are WHEN, N; need a column TIMESTAMP"),
        ("N,TIMESTAMP\n1,soon\n", "line 2: TIMESTAMP: found 'soon'"),
        ("N,TIMESTAMP\n1\n", "line 2: TIMESTAMP: found ''"),
        ("TIMESTAMP\n", "no arrivals after the header"),
    ],
)
def test_wrong_arrivals_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        recorded_arrivals(path)


def test_poisson_arrivals_repeat_with_their_seed_and_keep_the_rate() -> None:
    arrivals = poisson_arrivals(4001, 5.0, seed=3)
    assert arrivals == poisson_arrivals(4001, 5.0, seed=3)
    assert arrivals != poisson_arrivals(4001, 5.0, seed=4)
    assert list(arrivals) == sorted(arrivals)
    assert arrivals[-1] / 4000 == pytest.approx(1 / 5.0, rel=0.05)


def test_sessions_are_drawn_by_the_seed_in_file_order(
    make_plan: Callable[..., ReplayPlan],
) -> None:
    plan = make_plan(sessions=30, calls=1)
    trace = ScaledTrace(plan.prompts.scale, plan.sessions, 0, 0)
    chosen = choose_sessions(trace, 10, seed=1)
    numbers = [int(session.id[1:]) for session in chosen]
    assert (len(numbers), numbers) == (10, sorted(set(numbers)))
    assert chosen != choose_sessions(trace, 10, seed=2)
    assert choose_sessions(trace, None, seed=1) == plan.sessions
    with pytest.raises(UserError, match=r"--sessions: 31 .* has 30"):
        choose_sessions(trace, 31, seed=1)


def test_a_limit_takes_the_calls_that_come_first(make_plan: Callable[..., ReplayPlan]) -> None:
    sessions = make_plan(sessions=4, calls=3).sessions
    limited = limit_calls(sessions, concurrency=2, most=8)
    assert [(session.id, len(session.calls)) for session in limited] == [
        ("s0", 3),
        ("s1", 3),
        ("s2", 1),
        ("s3", 1),
    ]
    assert [len(session.calls) for session in limit_calls(sessions, 3, 2)] == [1, 1]
    assert limit_calls(sessions, 2, 99) == sessions


def test_figures_count_shared_blocks_once() -> None:
    scale = Scale(Fraction(1, 16), 64)

    def call(index: int, blocks: int, own: int) -> ScaledCall:
        runs = (BlockRun(0, 2), BlockRun(own, blocks - 2))
        return ScaledCall(index, runs, own + 500, blocks * 4 + 1, 3, 0.0)

    first = ScaledSession("a", (call(0, 3, 1000), call(1, 5, 1000)), 0.0)
    second = ScaledSession("b", (call(0, 4, 2000),), 0.0)
    size = figures((first, second), scale, concurrency=2)
    # Shared 2 blocks, then 3 of a and 2 of b, and one tail token each (a's two tails are one id).
    assert size.unique_prompt_tokens == (2 + 3 + 2) * 4 + 2
    assert (size.sessions, size.calls, size.max_input_tokens) == (2, 3, 21)
    assert size.best_prefix_hit_tokens == 13 + 21 + 17 - 30
    # Both first calls together, then a's second call alone.
    assert (size.max_live_set_tokens, size.mean_live_set_tokens) == ((2 + 1 + 2) * 4 + 2, 21.5)
    assert f"{size.unique_prompt_tokens}" in size.to_text()
