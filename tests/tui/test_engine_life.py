"""An engine that starts, drains, restarts or is given up: header, health page and fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recorded_node import recorded, recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.model import NodeModel
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.engine import engine_life
from hisparsed.tui.views.fleet import fleet_line
from hisparsed.tui.views.header import Banner, header_lines
from hisparsed.tui.views.health import health_lines

NOW_S = recorded("status")["at_unix_s"]
CONTEXT = ViewContext(now_s=NOW_S)
DIED = {"at_unix_s": NOW_S - 4, "why": "the engine ended by SIGKILL", "evidence": "/x/end-1.json"}
WAITS = {
    "engine.state": "restarting",
    "engine.since_unix_s": NOW_S - 4,
    "engine.next_try_unix_s": NOW_S + 8,
    "engine.ends_in_window": 2,
    "engine.last_exit": DIED,
    "lifecycle": "restarting",
}


def model_with(changes: dict[str, Any]) -> NodeModel:
    model = recorded_model()
    model.apply(updates.StatusNews(status_with(changes)), NOW_S)
    return model


def header(model: NodeModel, now_s: float = NOW_S) -> str:
    lines = header_lines(model, Banner(), 120, ViewContext(now_s=now_s))
    return "\n".join(one.plain for one in lines)


def health(model: NodeModel, width: int = 120) -> str:
    return "\n".join(one.plain for one in health_lines(model, width, CONTEXT))


def test_the_header_counts_down_to_the_next_try_and_says_why() -> None:
    model = model_with(WAITS)
    words = "engine restarting for 4s, next try in 8s, 2 ends (at most 5): the engine ended by"
    assert words in header(model)
    assert "○ restarting" in header(model)
    later = header(model, NOW_S + 3)
    assert "for 7s, next try in 5s" in later
    assert "next try now" in header(model, NOW_S + 20)


def test_a_first_start_is_no_trouble_and_has_no_reason() -> None:
    starting = {"lifecycle": "starting", "observed": None, "engine.state": "starting"}
    shown = header(model_with(starting))
    assert "engine starting for 1m26s" in shown
    assert "end" not in shown.splitlines()[1].replace("engine", "")


def test_a_drain_still_has_an_engine() -> None:
    model = model_with({"engine.state": "draining", "lifecycle": "draining"})
    assert "engine draining" in header(model)
    assert not model.outdated


def test_an_engine_that_was_given_up_is_the_worst_that_can_be() -> None:
    failed = model_with({"engine.state": "failed", "engine.last_exit": DIED})
    assert failed.severity().word == "engine failed"
    assert failed.severity().rank > model_with(WAITS).severity().rank > 80
    life = engine_life(failed.status)
    assert life is not None
    assert life.role == "bad"


def test_the_health_page_has_the_last_end_and_its_evidence() -> None:
    shown = health(model_with(WAITS))
    assert "engine   ○ restarting for 4s, next try in 8s, 2 ends (at most 5)" in shown
    assert (
        "last end 20:15:31: the engine ended by SIGKILL\n         evidence /x/end-1.json" in shown
    )
    calm = health(model_with({"engine.restarts_total": 3}))
    assert "engine   ● serving for 1m26s, 3 restarts" in calm


def test_values_that_were_put_aside_are_told_with_their_error() -> None:
    aside = {
        "at_unix_s": NOW_S,
        "error": "ValueError: no such dtype\nsecond line",
        "changes": [{"key": "engine_args.dtype", "running": "auto", "wanted": "x8"}],
    }
    model = model_with({"engine.quarantined": aside})
    shown = health(model)
    assert "PUT ASIDE at 20:15:35: engine_args.dtype = x8 did not start" in shown
    assert "ValueError: no such dtype" in shown
    assert "second line" in shown
    assert "VALUES PUT ASIDE" in header(model)


def test_the_fleet_shows_when_the_engine_is_tried_again() -> None:
    assert "engine: try in 8s" in fleet_line(model_with(WAITS), 120, CONTEXT).plain
    lost = model_with(WAITS)
    lost.apply(updates.Lost("gone"), NOW_S)
    assert "lost 20:15:35" in fleet_line(lost, 120, CONTEXT).plain


@pytest.mark.parametrize("told", [None, {}, {"state": "restarting"}, {"state": 7}, "x"])
def test_a_node_that_tells_little_or_nothing_is_shown_without_it(told: Any) -> None:
    model = model_with({"engine": told})
    assert header(model)
    assert ("engine   ○ restarting" in health(model)) == (told == {"state": "restarting"})
    assert model.severity().word


async def test_figures_of_an_engine_that_is_gone_turn_grey(
    make_app: Callable[..., TopApp],
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        view = app.screen.query_one("#overview-lines")
        assert not view._stale  # type: ignore[attr-defined]
        app.sessions[0].model.apply(updates.StatusNews(status_with(WAITS)), NOW_S)
        app.draw()
        assert view._stale  # type: ignore[attr-defined]


def test_a_fatal_finding_is_seen_on_every_page_and_in_the_fleet() -> None:
    model = model_with({"doctor.fatal": 1, "observed.gpu.waiting_for_blocks": True})
    assert "DOCTOR: FATAL" in header(model)
    assert model.severity().word == "doctor: fatal"


def test_a_look_that_came_to_nothing_is_told() -> None:
    assert "TROUBLE no answer for 30s" in health(model_with({"doctor.error": "no answer for 30s"}))


def test_a_recorded_journal_says_where_findings_are() -> None:
    model = model_with({"recorded": True, "doctor": None, "canary": None, "journal": None})
    shown = health(model)
    assert shown.count("its events are on page 2") == 2
    assert "journal  a recording" in shown
