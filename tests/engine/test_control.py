"""The control method on a real engine: what it puts in force, bounds, refuses and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    EngineShape,
    apply,
    ask,
    at_most,
    build_engine,
    converse,
    core_of,
    finish,
    make_conversations,
    report,
    text,
)

from hisparsed.engine.control import DecodeTime
from hisparsed.engine.plugin import CONTROL_METHOD, control, register

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("control"), EngineShape(gpu_blocks=600))


def test_the_plugin_adds_one_method_and_only_where_hisparsed_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delattr(EngineCore, CONTROL_METHOD, raising=False)
    monkeypatch.delenv("HISPARSED_ENGINE", raising=False)
    register()
    assert not hasattr(EngineCore, CONTROL_METHOD)
    monkeypatch.setenv("HISPARSED_ENGINE", "1")
    register()
    assert getattr(EngineCore, CONTROL_METHOD) is control


def test_an_idle_engine_moves_blocks_both_ways(engine: Any) -> None:
    assert apply(engine, {"offload_target_blocks": 900})["lent_blocks"] == 900
    host = report(engine)
    assert (host["offload"]["lent_blocks"], host["pending_blocks"], host["draining_blocks"]) == (
        900,
        0,
        0,
    )
    assert apply(engine, {"offload_target_blocks": 100})["lent_blocks"] == 100


def test_nothing_is_lent_where_copies_are_not_proved(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = report(engine)["offload"]["lent_blocks"]
    monkeypatch.setattr(core_of(engine).scheduler.hisparsed, "_lends", False)
    with pytest.raises(ValueError, match="copies of indexer chunks are not proved"):
        apply(engine, {"offload_target_blocks": 10})
    assert report(engine)["offload"]["lent_blocks"] == lent


def test_a_target_beyond_the_floor_is_bounded_and_said(engine: Any) -> None:
    told = report(engine)
    geometry, floor = told["geometry"], told["hisparse"]["floor_blocks"]
    result = apply(engine, {"offload_target_blocks": geometry["budget_blocks"]})
    assert result["offload_target_blocks"] == geometry["budget_blocks"] - floor
    apply(engine, {"offload_target_blocks": 500})


def test_the_multiplier_is_in_whole_blocks_and_within_the_configured_maximum(engine: Any) -> None:
    assert apply(engine, {"multiplier": 1.5})["lease_blocks"] == 6
    assert apply(engine, {"multiplier": 1.1})["multiplier"] == 1.25, "rounded up to a block"
    assert apply(engine, {"multiplier": 9.0})["multiplier"] == 4.0
    assert report(engine)["hot"]["lease_blocks"] == 16


def test_the_default_watermark_follows_the_multiplier(engine: Any) -> None:
    apply(engine, {"multiplier": 4.0, "watermark": "default"})
    assert report(engine)["watermark"]["blocks"] == 60, "a tenth of 600 blocks"
    assert apply(engine, {"watermark": 123})["transition_watermark"] == 123
    assert apply(engine, {"multiplier": 2.0})["transition_watermark"] == 123
    assert apply(engine, {"watermark": "default"})["transition_watermark"] == 60


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ({"multiplier": 0.5}, "below 64 hot rows"),
        ({"offload_target_blocks": -1}, "offload_target_blocks"),
        ({"admission": {"order": "random"}}, "held-prefix-first"),
        ({"multiplyer": 2}, "multiplyer"),
    ],
)
def test_a_bad_command_changes_nothing_and_the_engine_lives(
    engine: Any, command: dict[str, Any], message: str
) -> None:
    before = report(engine)
    with pytest.raises(ValueError, match=message):
        apply(engine, {"offload_target_blocks": 700, **command})
    after = report(engine)
    assert after["offload"] == before["offload"]
    assert after["hot"]["multiplier"] == before["hot"]["multiplier"]


def test_an_unknown_action_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="'reset' is unknown; use one of report, apply"):
        control(core_of(engine), "reset", {})


def test_the_admission_limit_holds_calls_back_without_touching_running_ones(engine: Any) -> None:
    running: list[int] = []
    held_back: list[int] = []

    def between_steps(step: int) -> None:
        if step == 5:
            apply(engine, at_most(2))
        requests = report(engine)["requests"]
        running.append(requests["running"])
        held_back.append(requests["held_back"])

    run = converse(engine, make_conversations(6, 2, 120, 40, 20, seed=1), between_steps)
    assert max(running[:5]) > 2
    assert max(running[60:]) <= 2
    assert max(held_back) > 0
    assert run.last_report["requests"]["finished_total"] == 12
    assert apply(engine, at_most(99))["max_running"] == 12, "what it was started with"


def test_counters_and_sessions_of_a_run(engine: Any) -> None:
    before = report(engine)
    run = converse(engine, make_conversations(3, 3, 200, 40, 12, seed=2))
    after = run.last_report
    assert after["requests"]["finished_total"] - before["requests"]["finished_total"] == 9
    assert after["progress"]["steps_total"] - before["progress"]["steps_total"] == run.steps
    assert after["sessions"]["live_sessions"] - before["sessions"]["live_sessions"] == 3
    assert (
        after["progress"]["scheduled_tokens_total"] > before["progress"]["scheduled_tokens_total"]
    )
    assert after["hisparse"]["in_use_blocks"] == 0
    assert after["gpu"]["free_blocks"] == 599


def test_the_head_says_what_it_needs_until_it_starts_and_how_long_it_waits(tmp_path: Path) -> None:
    engine = build_engine(tmp_path, EngineShape(gpu_blocks=170, max_num_seqs=4, max_model_len=1024))
    scheduler = core_of(engine).scheduler
    now_s = [1_000.0]
    scheduler.wall_clock_s = lambda: now_s[0]
    apply(engine, {"offload_target_blocks": 100, "multiplier": 1.0})
    idle = report(engine)
    assert (idle["gpu"]["head_need_blocks"], idle["requests"]["oldest_wait_s"]) == (None, None)
    for name in ("first", "second", "third"):
        ask(engine, name, text(700, seed=name), 30)
    for _ in range(12):
        engine.step()
    (head,) = scheduler.waiting
    head.arrival_time = 990.0
    short = report(engine)
    assert short["gpu"]["head_need_blocks"] > short["gpu"]["free_blocks"]
    assert short["gpu"]["head_need_blocks"] < 170, "a call that could never start would be no need"
    assert short["requests"]["oldest_wait_s"] == 10.0
    head.num_preemptions = 1
    assert report(engine)["requests"]["oldest_wait_s"] is None, "it has run meanwhile"
    finish(engine)
    done = report(engine)
    assert (done["gpu"]["head_need_blocks"], done["requests"]["oldest_wait_s"]) == (None, None)


def test_a_limit_is_no_need_of_blocks(tmp_path: Path) -> None:
    engine = build_engine(tmp_path, EngineShape())
    apply(engine, {"offload_target_blocks": 100, **at_most(1)})
    for name in ("first", "second"):
        ask(engine, name, text(100, seed=name), 30)
    engine.step()
    seen = report(engine)
    assert (seen["requests"]["waiting"], seen["gpu"]["head_need_blocks"]) == (1, None)


def seconds(*passes: tuple[float, bool, Sequence[int]], query_len: int = 4) -> float:
    """``passes``: when each begins, whether requests ran on till then, and what it schedules."""
    time = DecodeTime(query_len)
    for now_s, running, scheduled in passes:
        time.pass_begins(now_s, running)
        time.pass_ended(scheduled)
    return time.seconds


def test_a_step_that_only_decodes_lasts_until_the_next_pass() -> None:
    assert seconds((1.0, False, [4, 1]), (1.5, True, [4, 4]), (3.0, True, [2])) == 2.0


def test_a_step_with_prefill_in_it_does_not_count() -> None:
    assert seconds((1.0, False, [4, 500]), (2.0, True, [4, 4]), (2.5, True, [])) == 0.5


def test_a_step_of_more_tokens_than_drafts_and_one_is_prefill() -> None:
    assert seconds((1.0, False, [5]), (2.0, True, [])) == 0.0
    assert seconds((1.0, False, [2]), (2.0, True, []), query_len=1) == 0.0


def test_a_pause_does_not_count() -> None:
    assert seconds((1.0, False, [1]), (60.0, False, [1]), (60.5, True, [])) == 0.5


def test_a_pass_that_schedules_nothing_does_not_count() -> None:
    assert seconds((1.0, True, []), (5.0, True, [])) == 0.0
