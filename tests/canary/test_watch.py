"""What the canary does with answers: records, alarms, freezes, keeps evidence, and clears."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from side import RIGHT, Scripted

from hisparsed.canary.round import CanaryQuestion, Trigger, make_prompt, prompt_tokens
from hisparsed.canary.watch import MOST_FILES
from hisparsed.control.status.document import CanaryState
from hisparsed.engine.messages import report_to_wire
from hisparsed.engine.port import EngineGone
from hisparsed.policy.signals import AdmissionOrder, EngineReport, Lever

EVERY_S = 600.0
WRONG = (5, 6, 9, 8)


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
def side(engine: Scripted, make_side: Callable[[Any], Any]) -> Any:
    return make_side(engine)


def wrong_in(residency: str) -> Callable[[CanaryQuestion], tuple[int, ...]]:
    return lambda question: WRONG if question.residency == residency else RIGHT


def kept_file(path: str) -> tuple[int, str]:
    """Mode and text."""
    return stat.S_IMODE(Path(path).stat().st_mode), Path(path).read_text()


async def rounds(side: Any, report: EngineReport, count: int = 1, **canary: Any) -> None:
    for _ in range(count):
        await side.tick(report, **canary)
        side.now_s += EVERY_S


async def test_the_first_round_computes_the_answer_and_the_others_must_equal_it(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    await rounds(side, report, 2)
    asked = [(one.residency, one.recompute) for one in engine.asked]
    first = [("full", True), ("none", False), ("mixed", False)]
    assert asked == [*first, ("none", False), ("mixed", False), ("full", True)]
    assert side.events() == ["canary-recorded"]
    status = side.canary.status()
    assert (status.state, status.rounds_total) == (CanaryState.OK, 2)
    assert "4 tokens equal in no, mixed and full residency" in status.sentence


@pytest.mark.parametrize("residency", ["full", "mixed", "none"])
async def test_another_answer_freezes_alarms_and_keeps_evidence(
    engine: Scripted, side: Any, report: EngineReport, residency: str
) -> None:
    await rounds(side, report)
    engine.reply = wrong_in(residency)
    await rounds(side, report)
    status = side.canary.status()
    assert (status.state, status.mismatches_total) == (CanaryState.MISMATCH, 1)
    assert not status.not_ready
    assert side.holds.frozen == frozenset(Lever)
    assert side.events()[-1] == "canary-mismatch"
    word = "no" if residency == "none" else residency
    assert f"token 3 of 4 differs in {word} residency" in side.last_words()
    mode, text = kept_file(status.evidence)
    assert mode == 0o640
    document = json.loads(text)
    assert document["expected"] == list(RIGHT)
    differing = [one for one in document["answers"] if one["got"] == list(WRONG)]
    assert [one["asked"] for one in differing] == [residency]
    assert document["decisions"]
    assert "of-a-user" in str(report_to_wire(report))
    assert "of-a-user" not in text


async def test_a_difference_in_the_first_round_alarms_and_records_nothing(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    engine.reply = wrong_in("none")
    await rounds(side, report)
    assert side.events() == ["canary-mismatch"]
    engine.reply = lambda question: RIGHT
    await rounds(side, report)
    assert side.events() == ["canary-mismatch", "canary-recorded"]


async def test_not_ready_only_where_the_policy_asks_for_it(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    engine.reply = wrong_in("mixed")
    await rounds(side, report, on_mismatch="freeze-and-not-ready")
    assert side.canary.status().not_ready
    assert "The node answers not ready." in side.last_words()


async def test_a_clean_round_by_itself_does_not_end_the_alarm_one_that_was_asked_for_does(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    await rounds(side, report)
    engine.reply = wrong_in("none")
    await rounds(side, report, on_mismatch="freeze-and-not-ready")
    engine.reply = lambda question: RIGHT
    await rounds(side, report)
    assert side.canary.status().state is CanaryState.MISMATCH
    await side.canary.run(Trigger.OPERATOR, actor="ann")
    status = side.canary.status()
    assert (status.state, status.not_ready) == (CanaryState.OK, False)
    assert side.events()[-1] == "canary-cleared"
    assert side.holds.frozen == frozenset(Lever), "thawing is for people"


async def test_an_engine_that_does_not_answer_is_told_and_asked_again(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    engine.reply = lambda question: TimeoutError("no answer")
    await rounds(side, report)
    assert side.canary.status().state is CanaryState.FAILED
    assert side.events() == ["canary-failed"]
    assert side.holds.frozen == frozenset()
    engine.reply = lambda question: RIGHT
    await rounds(side, report)
    assert side.canary.status().state is CanaryState.OK


async def test_a_failed_round_does_not_end_an_alarm(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    engine.reply = wrong_in("none")
    await rounds(side, report)
    engine.reply = lambda question: TimeoutError("no answer")
    await rounds(side, report)
    assert side.canary.status().state is CanaryState.MISMATCH


async def test_a_dead_engine_is_not_the_canarys_to_tell(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    engine.reply = lambda question: EngineGone("dead")
    await rounds(side, report)
    assert side.events() == []


async def test_memory_that_moved_asks_for_a_round(side: Any, report: EngineReport) -> None:
    await side.tick(report)
    side.now_s += 70
    lent = replace(report, offload=replace(report.offload, target_blocks=150), pending_blocks=9)
    await side.tick(lent)
    assert side.canary.status().rounds_total == 1, "blocks are still on their way"
    await side.tick(replace(lent, pending_blocks=0))
    status = side.canary.status()
    assert (status.rounds_total, status.last_trigger) == (2, "move")


@pytest.mark.parametrize("busy", ["waiting", "coverage"])
async def test_a_node_with_more_work_than_it_can_do_is_left_alone(
    engine: Scripted, side: Any, report: EngineReport, busy: str
) -> None:
    if busy == "waiting":
        report = replace(report, requests=replace(report.requests, waiting=1))
    else:
        ordered = replace(report.admission, order=AdmissionOrder.HELD_PREFIX_FIRST)
        report = replace(report, admission=ordered)
    await side.tick(report)
    assert engine.asked == []
    assert side.canary.status().left_out_total == 1


async def test_off_asks_nothing(engine: Scripted, side: Any, report: EngineReport) -> None:
    await rounds(side, report, 2, enabled=False)
    assert engine.asked == []
    assert side.canary.status().state is CanaryState.OFF


async def test_another_length_in_the_policy_records_anew(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    await rounds(side, report)
    await rounds(side, report, tokens=32)
    assert side.events() == ["canary-recorded", "canary-recorded"]
    assert engine.asked[-1].tokens == 32


async def test_a_round_under_way_is_not_doubled_and_ends_with_the_node(
    engine: Scripted, side: Any, report: EngineReport
) -> None:
    begun = asyncio.Event()

    async def never(question: CanaryQuestion) -> Any:
        begun.set()
        await asyncio.Event().wait()

    engine.ask = never  # type: ignore[method-assign]
    outcome = side.outcome(report)
    side.canary.watch(outcome)
    await begun.wait()
    under_way = side.canary._round
    side.now_s += 2 * EVERY_S
    side.canary.watch(outcome)
    assert side.canary._round is under_way
    await side.canary.close()
    assert not side.canary.status().running


async def test_only_the_latest_files_are_kept(
    engine: Scripted, side: Any, report: EngineReport, tmp_path: Path
) -> None:
    engine.reply = wrong_in("none")
    await rounds(side, report, MOST_FILES + 3)
    kept = sorted((tmp_path / "canary").iterdir())
    assert len(kept) == MOST_FILES
    assert str(kept[-1]) == side.canary.status().evidence


async def test_evidence_that_cannot_be_written_is_told(
    engine: Scripted, side: Any, report: EngineReport, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("in the way")
    engine.reply = wrong_in("none")
    await rounds(side, report)
    assert "The evidence could not be written: File exists." in side.last_words()
    assert side.holds.frozen == frozenset(Lever)


async def test_cost_is_counted(side: Any, report: EngineReport) -> None:
    await rounds(side, report)
    status = side.canary.status()
    assert status.scheduled_tokens_total == 60
    assert status.step_seconds_total == 1.5
    assert status.share_of_time == 1.5 / EVERY_S


def test_the_prompt_is_some_top_k_long_at_least_six_pages_at_most_a_quarter_of_the_longest_call(
    report: EngineReport,
) -> None:
    geometry = report.geometry
    assert (geometry.topk, geometry.block_tokens, geometry.max_model_len) == (64, 16, 1_024)
    assert prompt_tokens(2.0, geometry) == 128
    assert prompt_tokens(1.0, geometry) == 96
    assert prompt_tokens(9.0, geometry) == 256


def test_the_prompt_ends_with_its_own_beginning_so_that_the_rest_follows() -> None:
    engine = Scripted()
    prompt = make_prompt(engine, 500)
    text = bytes(prompt).decode()
    listed, again = text.split("\n\n")
    assert len(prompt) == 500
    assert listed.startswith(again)
    assert len(again) == 125
    assert len(set(listed.splitlines())) == len(listed.splitlines())
