"""Restarting the engine over the control API, and its life as lines of text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from hisparsed.config.node import load_node_config
from hisparsed.control.api.engine import EngineApi, EngineBusyError, RestartPlan
from hisparsed.control.api.errors import ERROR_HANDLERS
from hisparsed.control.status.document import (
    EngineEnd,
    EngineState,
    EngineStatus,
    QuarantinedValues,
)
from hisparsed.control.text.status import engine_lines
from hisparsed.policy.keys import PendingRestart

CHANGE = PendingRestart("host_budget", "24MiB", "32MiB")


class Engine:
    """An ``EngineRestarter`` that notes what is asked of it; ``trouble`` is what it raises."""

    def __init__(self) -> None:
        self.asked: list[tuple[float | None, str | None]] = []
        self.trouble: Exception | None = None

    def plan_restart(self, drain_s: float | None) -> RestartPlan:
        return self._plan(drain_s, None)

    def restart(self, drain_s: float | None, *, actor: str) -> RestartPlan:
        return self._plan(drain_s, actor)

    def _plan(self, drain_s: float | None, actor: str | None) -> RestartPlan:
        self.asked.append((drain_s, actor))
        if self.trouble is not None:
            raise self.trouble
        return RestartPlan(
            sentence="Then the engine starts.",
            open_requests=2,
            drain_s=drain_s or 0.0,
            changes=[CHANGE],
            left=[],
            begun=actor is not None,
        )


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=EngineApi(engine).routes(), exception_handlers=ERROR_HANDLERS)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


async def restart(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/engine/restart", json={"actor": "ann", **body})


async def test_a_restart_begins_with_who_asked_and_how_long_calls_get(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    answer = (await restart(http, drain_s=30)).json()
    assert engine.asked == [(30.0, "ann")]
    assert answer["begun"]
    assert answer["changes"] == [{"key": "host_budget", "running": "24MiB", "wanted": "32MiB"}]


async def test_a_dry_run_only_says_what_would_happen(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    answer = (await restart(http, dry_run=True)).json()
    assert engine.asked == [(None, None)]
    assert (answer["begun"], answer["open_requests"]) == (False, 2)


async def test_while_one_goes_on_another_is_refused(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    engine.trouble = EngineBusyError("open calls end")
    answer = await restart(http)
    assert answer.status_code == 409
    assert answer.json()["error"] == {"code": "engine_busy", "message": "open calls end"}


async def test_a_document_with_a_mistake_is_refused_with_its_line(
    http: httpx.AsyncClient, engine: Engine, tmp_path: Path
) -> None:
    document = tmp_path / "hisparsed.yaml"
    document.write_text("host_bugdet: 1GiB\n")
    with pytest.raises(Exception, match="host_bugdet") as caught:
        load_node_config(document, memory_bytes=2**40)
    engine.trouble = caught.value
    answer = await restart(http)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "document_rejected")
    assert "hisparsed.yaml:1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"drain_s": -1}, {"drain_s": 1e9}, {"now": True}, {"actor": ""}])
async def test_what_makes_no_sense_is_refused_and_nothing_begins(
    http: httpx.AsyncClient, engine: Engine, body: dict[str, Any]
) -> None:
    assert (await restart(http, **body)).status_code == 400
    assert engine.asked == []


def life(**more: Any) -> EngineStatus:
    values = {"state": EngineState.SERVING, "since_unix_s": 0.0, "sentence": "the engine serves"}
    return EngineStatus.model_validate({**values, **more})


def test_an_engine_that_always_served_takes_one_line() -> None:
    (line,) = engine_lines(life(last_start_s=12.4))
    assert line.startswith("engine     the engine serves; 0 restarts")
    assert "the last start took 12s" in line


def test_an_engine_that_is_away_is_marked_with_how_it_ended() -> None:
    end = EngineEnd(at_unix_s=1.0, why="dead", processes=["EngineCore died"], evidence="end.json")
    first, second = engine_lines(life(state=EngineState.RESTARTING, last_exit=end))
    assert first.startswith("engine     !! ")
    assert second == "  LAST END dead (EngineCore died); evidence: end.json"


def test_values_quarantined_are_named_with_what_runs() -> None:
    aside = QuarantinedValues(at_unix_s=1.0, error="too small", changes=[CHANGE])
    (_, line) = engine_lines(life(quarantined=aside))
    assert line == "  QUARANTINED host_budget 32MiB (runs 24MiB): too small"
