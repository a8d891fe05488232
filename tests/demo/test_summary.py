"""The demo's summary: figures, reasons and words follow from what happened, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hisparsed.config.node import load_node_config
from hisparsed.control.journal.records import DecisionView
from hisparsed.demo.node import MODELS, node_document, policy_document
from hisparsed.demo.origin import Origin
from hisparsed.demo.summary import (
    Comparison,
    NodeRun,
    Sizing,
    Verdict,
    in_words,
    sentences,
    summary_document,
    verdict_of,
)
from hisparsed.engine.reference.launch import require_startable
from hisparsed.policy.document import parse_document
from hisparsed.policy.schema import Mode, Policy
from hisparsed.policy.signals import Lever
from hisparsed.replay.results import CallResult, ReplayResult


def call(session: str, index: int, *, digest: str = "same", error: str | None = None) -> CallResult:
    return CallResult(
        session_id=session,
        call_index=index,
        error=error,
        detail="",
        started_s=0.0,
        seconds=1.0,
        ttft_s=0.2,
        itl_s=(0.01, 0.02),
        prompt_tokens=100,
        completion_tokens=3,
        prefix_hit_tokens=64,
        retries=0,
        retry_wait_s=0.0,
        digest=digest,
        digest_of="tokens",
    )


def result(calls: list[CallResult], seconds: float) -> ReplayResult:
    return ReplayResult(tuple(calls), seconds, "end_of_trace", 0, 0, 0, 0)


def move(
    lever: Lever,
    at_s: float,
    current: float | str,
    wanted: float | str,
    code: str,
    *,
    acts: bool = True,
    error: str | None = None,
) -> DecisionView:
    return DecisionView(
        sequence=int(at_s),
        at_unix_s=at_s,
        tick=int(at_s),
        policy_generation=1,
        policy_hash="0",
        lever=lever,
        code=code,
        cause=code,
        limited_by=None,
        acts=acts,
        notable=True,
        current=current,
        wanted=wanted,
        in_force=None,
        error=error,
        figures={},
        sentence=f"{lever} from {current} to {wanted}.",
    )


ON = NodeRun(
    result=result([call("a", 0), call("a", 1), call("b", 0)], seconds=10.0),
    decisions=(
        move(Lever.SPLIT, 3.0, 650, 600, "OffloadBeyondReach"),
        move(Lever.SPLIT, 2.0, 700, 650, "OffloadBeyondReach"),
        move(Lever.SPLIT, 4.0, 600, 550, "OffloadBeyondReach", error="refused"),
        move(Lever.MULTIPLIER, 5.0, 4, 3, "GpuPoolPressure"),
        move(Lever.ADMISSION, 1.0, "arrival", "arrival", "AtTarget", acts=False),
    ),
    history={"columns": [], "rows": []},
)
OFF = replace(ON, result=result([call("a", 0), call("a", 1), call("b", 0)], 20.0), decisions=())
ORIGIN = Origin("node7: 2 CPUs", "hisparsed 1.2.3, vLLM 0.32.0", "standard: 8 layers, seed 5")
BOTH = Comparison(
    Sizing(calls=8, concurrency=2, load=1.5, tokens_per_s=1000.0), ON, OFF, 1000.0, ORIGIN
)


def took(on_s: float, off_s: float) -> Comparison:
    """The comparison where the nodes took these seconds."""
    on, off = (replace(run.result, seconds=s) for run, s in ((ON, on_s), (OFF, off_s)))
    return replace(BOTH, on=replace(ON, result=on), off=replace(OFF, result=off))


def test_moves_count_when_the_engine_carried_them_out() -> None:
    document = summary_document(BOTH)
    assert (document["pool_moves"], document["multiplier_changes"]) == (2, 1)
    assert document["admission_changes"] == 0
    assert document["moves_by_reason"] == {
        "split:OffloadBeyondReach": 2,
        "multiplier:GpuPoolPressure": 1,
    }
    assert document["policy_off"]["pool_moves"] == 0
    assert document["requests"] == 3
    assert document["calls_per_s"] == pytest.approx(0.3)
    assert document["prefix_hit_tokens"] == 192
    assert document["recomputed_tokens"] == 108


def test_a_different_answer_is_a_token_difference() -> None:
    other = result([call("a", 0), call("a", 1, digest="other"), call("b", 0)], 20.0)
    both = replace(BOTH, off=replace(OFF, result=other))
    document = summary_document(both)
    assert (document["compared"], document["token_differences"]) == (3, 1)
    assert "THIS IS A BUG" in in_words(both)


def test_the_words_say_what_moved_why_and_what_it_bought() -> None:
    words = in_words(BOTH)
    assert "split: 2 moves, from 700 to 600." in words
    assert "first: split from 700 to 650." in words
    assert "admission: no move." in words
    assert "in 50% less time" in words
    assert "3 answers compared, 0 differ" in words


@pytest.mark.parametrize(
    ("on_s", "off_s", "verdict", "words"),
    [
        (8.9, 10.0, Verdict.GAIN, "in 11% less time"),
        (9.1, 10.0, Verdict.NO_DIFFERENCE, "No difference: the times are 9% apart"),
        (10.9, 10.0, Verdict.NO_DIFFERENCE, "No difference: the times are 9% apart"),
        (15.0, 10.0, Verdict.LOSS, "needed 50% more time"),
    ],
)
def test_the_verdict_follows_from_the_times(
    on_s: float, off_s: float, verdict: Verdict, words: str
) -> None:
    both = took(on_s, off_s)
    assert verdict_of(both) is verdict
    assert words in in_words(both)


def test_with_few_calls_a_session_the_words_do_not_judge() -> None:
    few = replace(took(5.0, 10.0), sizing=replace(BOTH.sizing, calls=5, tokens_per_s=200.0))
    assert verdict_of(few) is Verdict.TOO_FEW_CALLS
    words = in_words(few)
    assert "Too few calls to compare: 5 from 2 sessions, at 200 prompt tokens per second" in words
    assert "less time" not in words


def test_where_all_fits_the_words_say_so() -> None:
    fits = replace(took(10.0, 10.0), sizing=replace(BOTH.sizing, load=0.7))
    assert "0.7 times the reach: every prefix fits" in in_words(fits)


def test_the_words_say_who_waited_longer() -> None:
    late = tuple(replace(one, ttft_s=9.0) for one in ON.result.calls)
    waited = replace(BOTH, on=replace(ON, result=replace(ON.result, calls=late)))
    assert "waited longer" in in_words(waited)
    assert "waited longer" not in in_words(BOTH)


def test_live_lines_are_moves_in_order() -> None:
    lines = sentences(ON.decisions)
    assert [line.split()[0] for line in lines] == ["split", "split", "split", "multiplier"]
    assert lines[0].endswith("split from 700 to 650.")


@pytest.mark.parametrize("mode", ["act", "off"])
def test_the_documents_of_the_demo_are_valid(tmp_path: Path, mode: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy_document(mode))
    assert parse_document(policy.read_text(), "policy.yaml", Policy).value.mode is Mode(mode)
    node = tmp_path / "hisparsed.yaml"
    for settings in MODELS.values():
        node.write_text(node_document(settings, tmp_path, 18000, policy))
        loaded = load_node_config(node, memory_bytes=8 << 30).value
        assert loaded.node == "reference"
        assert loaded.policy == policy
        require_startable(loaded, max_multiplier=4.0)
