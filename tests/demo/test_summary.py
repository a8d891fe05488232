"""The demo's summary: figures, reasons and words follow from what happened, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hisparsed.config.node import load_node_config
from hisparsed.control.journal.records import DecisionView
from hisparsed.demo.node import DemoSettings, node_document, policy_document
from hisparsed.demo.summary import NodeRun, in_words, sentences, summary_document
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
    recomputed_tokens=120,
    preemptions=1,
)
OFF = replace(ON, result=result([call("a", 0), call("a", 1), call("b", 0)], 20.0), decisions=())


def test_moves_count_when_the_engine_carried_them_out() -> None:
    document = summary_document(ON, OFF)
    assert (document["pool_moves"], document["multiplier_changes"]) == (2, 1)
    assert document["admission_changes"] == 0
    assert document["moves_by_reason"] == {
        "split:OffloadBeyondReach": 2,
        "multiplier:GpuPoolPressure": 1,
    }
    assert document["policy_off"]["pool_moves"] == 0
    assert document["requests"] == 3
    assert document["prefix_hit_tokens"] == 192


def test_a_different_answer_is_a_token_difference() -> None:
    other = result([call("a", 0), call("a", 1, digest="other"), call("b", 0)], 20.0)
    document = summary_document(ON, replace(OFF, result=other))
    assert (document["compared"], document["token_differences"]) == (3, 1)
    assert "THIS IS A BUG" in in_words(document, ON)


def test_the_words_say_what_moved_why_and_what_it_bought() -> None:
    words = in_words(summary_document(ON, OFF), ON)
    assert "split: 2 moves, from 700 to 600." in words
    assert "first: split from 700 to 650." in words
    assert "admission: no move." in words
    assert "in 50% less time" in words
    assert "3 answers compared, 0 differ" in words


def test_the_words_do_not_hide_a_loss() -> None:
    slower = replace(ON, result=replace(ON.result, seconds=30.0))
    words = in_words(summary_document(slower, OFF), slower)
    assert "needed 50% more time" in words


def test_the_words_say_who_waited_longer() -> None:
    late = tuple(replace(one, ttft_s=9.0) for one in ON.result.calls)
    waited = replace(ON, result=replace(ON.result, calls=late))
    assert "waited longer" in in_words(summary_document(waited, OFF), waited)
    assert "waited longer" not in in_words(summary_document(ON, OFF), ON)


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
    node.write_text(node_document(DemoSettings(), tmp_path, 18000, policy))
    loaded = load_node_config(node, memory_bytes=8 << 30).value
    assert loaded.node == "reference"
    assert loaded.policy == policy
