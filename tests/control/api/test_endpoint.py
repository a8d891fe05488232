"""The control API against its own OpenAPI document, with generated requests.

schemathesis makes them: valid ones, and ones that the document forbids. Each answer must be of a
status and a shape that the document has, and never a 500.
"""

from __future__ import annotations

import ast
import asyncio
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.engine import from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished

import hisparsed
from hisparsed.config.node import NodeConfig
from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.endpoint import Endpoint
from hisparsed.control.api.engine import EngineBusyError, RestartPlan
from hisparsed.control.api.errors import ERRORS
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.loop import ControlLoop
from hisparsed.control.status.document import CanaryState, CanaryStatus, DoctorFinding, EngineState
from hisparsed.engine.messages import RequestRow, RequestTable
from hisparsed.node.engine.values import EngineValues
from hisparsed.node.node import build_node, control_api
from hisparsed.node.service import ServiceManager

STREAM = "/v1/events"
"""Never ends; its content type is tested with the stream itself."""

ROW = RequestRow(
    request_id="cmpl-1",
    state="running",
    residency="mixed",
    context_tokens=900,
    computed_tokens=899,
    resident_share=0.25,
    hot_rows=90,
    hot_capacity_rows=128,
    references=100,
    resident=10,
    hits=80,
    loads=10,
    preemptions=0,
    age_s=1.5,
)


async def table() -> RequestTable:
    return RequestTable(rows=[ROW], running=1, waiting=0, omitted=0, took_us=20.0)


class Canary:
    """Stands for the watch of a node that serves."""

    def status(self) -> CanaryStatus:
        return CanaryStatus(state=CanaryState.WAITING, sentence="No round has ended yet.")

    async def run(self, trigger: object, *, actor: str) -> None:
        """Ends at once."""


class Engine:
    """Stands for the supervisor: says what a restart would do, and begins none."""

    def plan_restart(self, drain_s: float | None) -> RestartPlan:
        return RestartPlan(
            sentence="Nothing waits.", open_requests=0, drain_s=drain_s or 0.0, changes=[], left=[]
        )

    def restart(self, drain_s: float | None, *, actor: str) -> RestartPlan:
        raise EngineBusyError(f"the engine is restarting; {actor} must wait")


class MachineDoctor:
    findings = (
        DoctorFinding(
            check="clock", severity="note", what="a", why="b", fix="c", seen_unix_s=1_700_000_000.0
        ),
    )

    def look(self) -> tuple[DoctorFinding, ...]:
        return self.findings


@pytest.fixture
def api(node: Any, tmp_path: Path) -> ControlApi:
    """The API as the daemon puts it together, after some ticks, so that no answer is empty."""
    config = NodeConfig(
        host_budget=2**26,
        state_dir=tmp_path / "state",
        control_socket=tmp_path / "c.sock",
        policy=node.policy_path,
    )
    source = PolicySource(node.policy_path, clock=time.monotonic, wall_clock=time.time)
    config.state_dir.mkdir()
    document = tmp_path / "hisparsed.yaml"
    document.write_text("host_budget: 64MiB\n", encoding="utf-8")
    daemon = build_node(
        config,
        "reference",
        "small",
        source,
        EngineValues(config, 4.0),
        document=document,
        doctor=MachineDoctor(),
        manager=ServiceManager(lambda _: None, watchdog_s=None, clock=time.monotonic),
        folder=tmp_path,
    )
    daemon.views.logs.add("engine", 1.0, 30, "vllm", "a line")
    session: Any = SimpleNamespace(
        handle=SimpleNamespace(requests=table), canary=Canary(), on_tick=()
    )
    daemon.lifecycle.session = session
    daemon.lifecycle.state = replace(daemon.lifecycle.state, phase=EngineState.SERVING)

    async def run() -> None:
        loop = ControlLoop(node.engine, daemon.plane, set_admission=lambda _: None)
        await loop.start()
        for _ in range(5):
            await loop.tick()

    asyncio.run(run())
    daemon.operator.set_value("hot.step", 2, for_s=None, actor="ann")
    return control_api(daemon, Engine())


@dataclass
class Findings:
    """The findings of a schemathesis run over an API."""

    answered: int = 0
    operations: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def examine(app: Any, *, examples: int) -> Findings:
    """Run schemathesis' examples, boundary values and random requests; always the same ones."""
    config = schemathesis.Config.from_dict(
        {
            "seed": 7,
            "generation": {"max-examples": examples, "deterministic": True, "database": "none"},
            "phases": {"stateful": {"enabled": False}},
            # An error that only the daemon can find, such as a policy that does not fit this node,
            # is 422.
            "checks": {
                # 503 is a valid answer: an old report makes the node not ready.
                "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "503"]},
                "positive_data_acceptance": {
                    "expected-statuses": ["2xx", "404", "409", "422", "503"]
                },
            },
        }
    )
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", app=app, config=config)
    found = Findings()
    for event in from_schema(schema.exclude(path=STREAM)).execute():
        if isinstance(event, ScenarioFinished):
            recorder = event.recorder
            found.operations.add(recorder.label)
            found.answered += len(recorder.interactions)
            found.problems += [
                f"{recorder.label}: {check.failure_info.failure}\n{check.failure_info.code_sample}"
                for checks in recorder.checks.values()
                for check in checks
                if check.failure_info is not None
            ]
        elif isinstance(event, FatalError):
            raise event.exception
        elif isinstance(event, NonFatalError):
            found.problems.append(f"{event.label}: {event.value!r}")
    return found


@pytest.mark.parametrize(
    ("examples", "fewest"), [(4, 200), pytest.param(20, 500, marks=pytest.mark.long)]
)
def test_every_answer_is_one_that_the_document_has(
    api: ControlApi, examples: int, fewest: int
) -> None:
    found = examine(api.application(), examples=examples)
    assert found.problems == []
    assert found.answered > fewest
    described = {
        f"{endpoint.method} {endpoint.path.replace(':serial', '')}" for endpoint in endpoints(api)
    }
    assert found.operations == described - {f"GET {STREAM}"}


def endpoints(api: ControlApi) -> list[Endpoint]:
    found = [route for route in api.application().routes if isinstance(route, Endpoint)]
    return [one for one in found if one.path != "/v1/openapi.json"]


def test_every_route_is_described(api: ControlApi) -> None:
    bare = [one for one in api.application().routes if not isinstance(one, Endpoint)]
    assert bare == []


async def test_the_document_is_whole_and_served(api: ControlApi) -> None:
    transport = httpx.ASGITransport(app=api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        document = (await client.get("/v1/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    names = [
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    ]
    assert len(set(names)) == len(names) == len(endpoints(api)) + 1, "and the document itself"
    assert {name for name in names if not re.fullmatch(r"(get|post)(_[a-z]+)+", name)} == set()
    for path in document["paths"].values():
        for operation in path.values():
            answers = operation["responses"]
            assert {"200", "500"} <= answers.keys()
            errors = [content for status, content in answers.items() if status != "200"]
            assert all(error["content"]["application/json"]["examples"] for error in errors)


def raised_errors() -> set[tuple[int, str]]:
    """Status and code of each ``ApiError`` that the source raises."""
    folder = Path(hisparsed.__file__).parent
    calls = [
        node
        for file in (
            *folder.glob("control/**/*.py"),
            *folder.glob("canary/*.py"),
            *folder.glob("node/**/*.py"),
        )
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError"
    ]
    return {(call.args[0].value, call.args[1].value) for call in calls}  # type: ignore[attr-defined]


def test_every_error_has_its_place_in_the_table() -> None:
    raised = raised_errors()
    assert len(raised) >= 10
    assert raised - {(kind.status, code) for code, kind in ERRORS.items()} == set()


async def test_a_body_without_end_is_refused(api: ControlApi) -> None:
    transport = httpx.ASGITransport(app=api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.post("/v1/policy/check", json={"document": "x" * 2**20})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "allowed"), [("DELETE", {"GET", "HEAD"}), ("POST", {"GET", "HEAD"})]
)
async def test_a_wrong_method_says_which_is_right(
    api: ControlApi, method: str, allowed: set[str]
) -> None:
    transport = httpx.ASGITransport(app=api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.request(method, "/v1/status")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
