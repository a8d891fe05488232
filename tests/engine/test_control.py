"""The control method on a real engine: what it puts in force, bounds, refuses and reports."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import (
    EngineShape,
    apply,
    build_engine,
    converse,
    core_of,
    make_conversations,
    report,
)

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
    host = report(engine)["host"]
    assert (host["lent_blocks"], host["pending_blocks"], host["draining_blocks"]) == (900, 0, 0)
    assert apply(engine, {"offload_target_blocks": 100})["lent_blocks"] == 100


def test_a_target_beyond_the_floor_is_bounded_and_said(engine: Any) -> None:
    geometry = report(engine)["geometry"]
    result = apply(engine, {"offload_target_blocks": geometry["budget_blocks"]})
    assert result["offload_target_blocks"] == geometry["budget_blocks"] - geometry["floor_blocks"]
    apply(engine, {"offload_target_blocks": 500})


def test_the_multiplier_is_in_whole_blocks_and_within_the_configured_maximum(engine: Any) -> None:
    assert apply(engine, {"multiplier": 1.5})["lease_blocks"] == 6
    assert apply(engine, {"multiplier": 1.1})["multiplier"] == 1.25, "rounded up to a block"
    assert apply(engine, {"multiplier": 9.0})["multiplier"] == 4.0
    assert report(engine)["hot"]["lease_blocks"] == 16


def test_the_default_watermark_follows_the_multiplier(engine: Any) -> None:
    apply(engine, {"multiplier": 4.0, "transition_watermark": "default"})
    assert report(engine)["transition_watermark"] == 60, "a tenth of 600 blocks"
    assert apply(engine, {"transition_watermark": 123})["transition_watermark"] == 123
    assert apply(engine, {"multiplier": 2.0})["transition_watermark"] == 123
    assert apply(engine, {"transition_watermark": "default"})["transition_watermark"] == 60


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
    assert after["host"] == before["host"]
    assert after["hot"]["multiplier"] == before["hot"]["multiplier"]


def test_an_unknown_action_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="'reset' is unknown; use one of report, apply"):
        control(core_of(engine), "reset", {})


def test_the_admission_limit_holds_calls_back_without_touching_running_ones(engine: Any) -> None:
    running: list[int] = []
    held_back: list[int] = []

    def between_steps(step: int) -> None:
        if step == 5:
            apply(engine, {"admission": {"max_running": 2}})
        requests = report(engine)["requests"]
        running.append(requests["running"])
        held_back.append(requests["held_back"])

    run = converse(engine, make_conversations(6, 2, 120, 40, 20, seed=1), between_steps)
    assert max(running[:5]) > 2
    assert max(running[60:]) <= 2
    assert max(held_back) > 0
    assert run.last_report["requests"]["finished"] == 12
    assert apply(engine, {"admission": {}})["max_running"] == 12


def test_counters_and_sessions_of_a_run(engine: Any) -> None:
    before = report(engine)
    run = converse(engine, make_conversations(3, 3, 200, 40, 12, seed=2))
    after = run.last_report
    assert after["requests"]["finished"] - before["requests"]["finished"] == 9
    assert after["steps"] - before["steps"] == run.steps
    assert after["live_sessions"] - before["live_sessions"] == 3
    assert after["scheduled_tokens"] > before["scheduled_tokens"]
    assert after["host"]["hisparse_in_use_blocks"] == 0
    assert after["gpu_free_blocks"] == 599
