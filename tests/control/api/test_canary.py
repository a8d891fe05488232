"""The canary over the control API and on the command line, and what it means for readiness."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from hisparsed.canary.api import CanaryApi
from hisparsed.canary.round import CanaryAnswer, CanaryQuestion
from hisparsed.canary.verdict import Position
from hisparsed.canary.watch import CanaryWatch
from hisparsed.cli.app import app
from hisparsed.control.api.socket import ControlServer
from hisparsed.control.events import EventRecorder
from hisparsed.control.text.status import status_page
from hisparsed.engine.messages import CanaryReport

NOT_READY = "canary: {on_mismatch: freeze-and-not-ready, enabled: false}\n"


class Parrot:
    """A canary's engine that gives one answer until the test sets another."""

    def __init__(self) -> None:
        self.word = 1

    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer:
        seen = CanaryReport(full=3, mixed=0, none=0, scheduled_tokens=10, step_s=0.25)
        return CanaryAnswer(
            (Position(self.word, {self.word: -0.01, -1: -9.0}),) * question.tokens, 0, seen
        )


class Served:
    def __init__(self, node: Any) -> None:
        self.node = node
        self.parrot = Parrot()
        self.watch: CanaryWatch | None = None
        routes = CanaryApi(lambda: self.watch).routes()
        self.api = dataclasses.replace(node.api, more_routes=routes)
        self.server = ControlServer(
            self.api.application(), node.folder / "control.sock", end_streams=node.broadcast.close
        )

    def start_canary(self) -> None:
        node = self.node
        self.watch = watch = CanaryWatch(
            self.parrot,
            node.holds,
            EventRecorder(node.journal, node.broadcast, wall_clock=node.clock.wall),
            node.journal,
            node.folder,
            clock=node.clock.monotonic,
            wall_clock=node.clock.wall,
            exact=True,
        )
        node.canary = watch.status
        node.on_tick.append(watch.watch)

    async def command(self, *arguments: str) -> Result:
        socket = ["--socket", str(self.node.folder / "control.sock")]
        return await asyncio.to_thread(CliRunner().invoke, app, ["canary", *arguments, *socket])


@pytest.fixture
async def served(make_node: Any, policy_text: str) -> AsyncIterator[Served]:
    served = Served(make_node(policy_text + NOT_READY))
    await served.server.start()
    await served.node.loop.start()
    yield served
    await served.server.stop()


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=served.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


async def test_there_is_no_canary_before_the_engine(
    served: Served, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/v1/canary")).json()["error"]["code"] == "not_ready"
    assert (await http.get("/v1/status")).json()["canary"] is None
    served.start_canary()
    early = await http.post("/v1/canary/run", json={"actor": "ann"})
    assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")


async def test_a_round_is_asked_for_and_shown(served: Served, http: httpx.AsyncClient) -> None:
    served.start_canary()
    await served.node.ticks(1)
    assert (await http.get("/v1/canary")).json()["state"] == "off"
    answer = (await http.post("/v1/canary/run", json={"actor": "ann"})).json()
    assert answer["rounds_total"] == 1
    assert [one["equal"] for one in answer["last_round"]] == [True, True, True]
    assert (await http.get("/v1/status")).json()["canary"]["rounds_total"] == 1
    assert (await http.post("/v1/canary/run", json={})).status_code == 400


async def test_a_mismatch_makes_the_node_unready_until_a_clean_round_is_asked_for(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.start_canary()
    await served.node.ticks(1)
    assert (await served.command("--now")).exit_code == 0
    assert (await http.get("/readyz")).status_code == 200
    served.parrot.word = 2
    found = await served.command("--now")
    assert found.exit_code == 1
    assert "canary     mismatch" in found.output
    assert found.output.count("DIFFERENT") == 3
    assert "evidence   " in found.output
    unready = await http.get("/readyz")
    assert unready.status_code == 503
    assert "the canary gave a different answer: token 1 of 24" in unready.json()["error"]["message"]
    assert "canary     mismatch: token 1 of 24" in status_page(
        served.node.current.status(), width=500
    )
    served.parrot.word = 1
    assert (await served.command("--now")).exit_code == 0
    assert (await http.get("/readyz")).status_code == 200


async def test_the_command_prints_json(served: Served) -> None:
    served.start_canary()
    await served.node.ticks(1)
    shown = json.loads((await served.command("--json")).output)
    assert (shown["state"], shown["rounds_total"]) == ("off", 0)
