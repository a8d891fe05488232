"""The supervisor with engines that are made up: order, values, what is told and what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.control.api.engine import EngineBusyError
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.document import Lifecycle
from hisparsed.errors import EngineStartError, UserError
from hisparsed.node.control_plane import ControlParts, build_control
from hisparsed.node.engine.life import StoppedWhileStarting
from hisparsed.node.engine.records import EngineRecord
from hisparsed.node.engine.supervision import Died, Outcome
from hisparsed.node.engine.supervisor import Supervisor, SupervisorParts
from hisparsed.node.engine.values import EngineValues
from hisparsed.node.openai.admission import Gate
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.session_limit import Queue, SessionDoor
from hisparsed.node.openai.upstream import EngineSlot
from hisparsed.node.service import ServiceManager
from hisparsed.policy.events import EventKind

POLICY = "version: 1\n"


class MadeUpLife:
    """An engine that serves until it is told to die. ``trouble`` is what its start raises."""

    def __init__(self, values: EngineValues, trouble: Exception | None) -> None:
        self.values = values
        self.trouble = trouble
        self.may_serve = asyncio.Event()
        self.may_serve.set()
        self.died: asyncio.Future[Died] = asyncio.get_running_loop().create_future()
        self.ended: bool | None = None
        self.last = None

    async def app(self, *_: object) -> None:
        """Answers no call before its engine's end."""
        await asyncio.Event().wait()

    def is_alive(self) -> bool:
        return not self.died.done()

    async def start(self, stop: asyncio.Event) -> None:
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self.may_serve.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in ends:
            one.cancel()
        if stop.is_set():
            raise StoppedWhileStarting
        if self.trouble is not None:
            raise self.trouble

    async def until_end(self) -> Died:
        return await self.died

    async def end(self, *, kill: bool) -> list[str]:
        self.ended = kill
        return ["EngineCore (pid 7) was killed by SIGKILL"]


class AnyDoctor:
    findings: tuple[()] = ()

    def look(self) -> tuple[()]:
        return ()


class Node:
    """A supervisor over made-up engines. ``troubles`` of the starts to come, oldest first."""

    def __init__(self, folder: Path, **supervision: Any) -> None:
        self.folder = folder
        self.supervision = {"first_wait": "1ms", "longest_wait": "2ms", **supervision}
        (folder / "policy.yaml").write_text(POLICY)
        self.lives: list[MadeUpLife] = []
        self.troubles: list[Exception | None] = []
        self.hold_starts = False
        self.document: dict[str, Any] = {"host_budget": "24MiB"}
        self.told: list[bytes] = []
        self.parts: ControlParts
        self.gate: Gate
        self.supervisor: Supervisor
        self.running: asyncio.Task[Outcome]

    def config(self) -> NodeConfig:
        return NodeConfig.model_validate(
            {
                "node": "reference",
                "state_dir": str(self.folder),
                "policy": str(self.folder / "policy.yaml"),
                "drain_timeout": "5s",
                "supervision": self.supervision,
                **self.document,
            }
        )

    def begin(self) -> Node:
        config = self.config()
        source = PolicySource(config.policy, clock=lambda: 0.0, wall_clock=lambda: 0.0)
        document = self.folder / "hisparsed.yaml"
        document.write_text(json.dumps({"host_budget": "24MiB"}))
        self.parts = build_control(config, source, "reference", "any", document, AnyDoctor())
        slot = self.slot = EngineSlot(self.away)
        door = SessionDoor(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
        self.gate = Gate(slot, door=door, metrics_page=lambda: b"")
        self.supervisor = Supervisor(
            config,
            EngineValues(config, 4.0),
            SupervisorParts(
                self.parts,
                self.gate,
                slot,
                ServiceManager(self.told.append, watchdog_s=3.0, clock=lambda: 0.0),
                EngineRecord(self.folder),
                self._life,  # type: ignore[arg-type]
                lambda: EngineValues(self.config(), 4.0),
                "http://node",
            ),
        )
        self.running = asyncio.create_task(self.supervisor.run())
        return self

    def away(self) -> Refusal:
        return self.supervisor.away()

    def _life(self, values: EngineValues, number: int) -> MadeUpLife:
        trouble = self.troubles.pop(0) if self.troubles else None
        self.lives.append(MadeUpLife(values, trouble))
        if self.hold_starts:
            self.lives[-1].may_serve.clear()
        return self.lives[-1]

    @property
    def state(self) -> str:
        return self.supervisor.status().state.value

    def takes_calls(self) -> bool:
        return self.gate._closed is None

    def lifecycle(self) -> Lifecycle:
        return self.parts.board.lifecycle

    def kinds(self) -> list[EventKind]:
        return [one.kind for one in reversed(self.parts.journal.recent_events(50))]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (many kinds of conditions)
                await asyncio.sleep(0.001)

    async def serving(self, lives: int) -> MadeUpLife:
        await self.until(lambda: len(self.lives) == lives and self.state == "serving")
        return self.lives[-1]

    async def stop(self) -> Outcome:
        self.supervisor.ask_stop()
        return await asyncio.wait_for(self.running, 10)


def read_json(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path).begin()
    yield node
    if not node.running.done():
        await node.stop()


async def test_calls_are_taken_only_while_an_engine_serves(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.hold_starts = True
    node.begin()
    await node.until(lambda: node.lives)
    assert node.lifecycle() is Lifecycle.STARTING
    assert node.parts.board.unready() is not None
    assert not node.takes_calls()
    node.lives[0].may_serve.set()
    await node.serving(1)
    assert node.takes_calls()
    assert node.lifecycle() is Lifecycle.SERVING
    assert b"READY=1\nSTATUS=Serving on http://node" in node.told
    assert await node.stop() is Outcome.STOPPED
    assert not node.takes_calls()


async def test_a_dead_engine_is_ended_kept_as_evidence_and_replaced(node: Node) -> None:
    first = await node.serving(1)
    first.died.set_result(Died("the engine core has died"))
    second = await node.serving(2)
    assert first.ended is False
    assert second.values.digest() == first.values.digest()
    turns = [kind for kind in node.kinds() if kind.startswith("engine-")]
    assert turns == ["engine-died", "engine-restarting", "engine-ready"]
    status = node.supervisor.status()
    assert (status.died_total, status.restarts_total, status.ends_in_window) == (1, 1, 1)
    assert status.last_exit is not None
    assert status.last_exit.evidence is not None
    kept = read_json(status.last_exit.evidence)
    assert kept["why"] == "the engine core has died"
    assert kept["processes"] == ["EngineCore (pid 7) was killed by SIGKILL"]


async def test_evidence_that_cannot_be_written_is_told_and_stops_no_restart(
    node: Node, tmp_path: Path
) -> None:
    first = await node.serving(1)
    (tmp_path / "engine-ends").touch()
    first.died.set_result(Died("the engine core has died"))
    await node.serving(2)
    status = node.supervisor.status()
    assert status.last_exit is not None
    assert status.last_exit.evidence is None
    told = [event.sentence for event in node.parts.journal.recent_events(9)]
    assert any("The evidence could not be written. The engine is started" in one for one in told)


async def test_an_engine_that_hangs_is_killed(node: Node) -> None:
    first = await node.serving(1)
    first.died.set_result(Died("no report", hangs=True))
    await node.serving(2)
    assert first.ended is True
    assert "The engine hangs: no report" in node.parts.journal.recent_events(9)[-1].sentence


async def test_the_watchdog_waits_longer_while_the_engine_restarts(node: Node) -> None:
    first = await node.serving(1)
    first.died.set_result(Died("dead"))
    await node.serving(2)
    spans = [int(one.partition(b"=")[2]) for one in node.told if one.startswith(b"WATCHDOG_USEC")]
    assert len(spans) == 2
    assert spans[0] > 3_000_000
    assert spans[1] == 3_000_000


async def test_too_many_deaths_give_up(tmp_path: Path) -> None:
    node = Node(tmp_path, most_restarts=1).begin()
    for number in (1, 2):
        (await node.serving(number)).died.set_result(Died("dead"))
    assert await asyncio.wait_for(node.running, 10) is Outcome.GIVEN_UP
    assert node.kinds()[-1] is EventKind.ENGINE_GONE
    assert node.lifecycle() is Lifecycle.ENGINE_GONE
    assert node.lives[-1].ended is False, "the last one was taken down too"


async def test_the_first_start_that_fails_raises_what_kept_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.troubles = [UserError("host_budget: too small")]
    node.begin()
    with pytest.raises(UserError, match="host_budget: too small"):
        await asyncio.wait_for(node.running, 10)
    assert len(node.lives) == 1


async def test_a_planned_restart_takes_new_values_and_keeps_them_as_the_good_ones(
    node: Node, tmp_path: Path
) -> None:
    await node.serving(1)
    node.document["host_budget"] = "32MiB"
    node.document["api"] = {"port": 8111}
    plan = node.supervisor.plan_restart(None)
    assert [one.key for one in plan.changes] == ["host_budget"]
    assert [one.key for one in plan.left] == ["api.port"]
    assert plan.drain_s == 5.0
    assert not plan.begun
    assert node.state == "serving", "a plan changes nothing"
    assert node.supervisor.restart(0.0, actor="ann").begun
    second = await node.serving(2)
    assert second.values.config.host_budget == 32 * 2**20
    assert second.values.config.api.port == 8000, "the daemon's own values stay"
    good = EngineRecord(tmp_path).good(node.config())
    assert good is not None
    assert good.digest() == second.values.digest()
    begun, ready = (one for one in node.parts.journal.recent_events(2)[::-1])
    assert (begun.actor, ready.actor) == ("ann", "ann")
    assert "host_budget 32MiB (was 24MiB)" in ready.sentence


async def test_a_second_restart_is_refused_while_one_goes_on(node: Node) -> None:
    await node.serving(1)
    node.hold_starts = True
    node.supervisor.restart(0.0, actor="ann")
    with pytest.raises(EngineBusyError, match="no restart can begin now"):
        node.supervisor.restart(0.0, actor="bob")
    await node.until(lambda: len(node.lives) == 2)
    with pytest.raises(EngineBusyError):
        node.supervisor.plan_restart(None)
    node.lives[-1].may_serve.set()
    await node.serving(2)


@pytest.mark.parametrize(
    ("failure", "tries", "why"),
    [(UserError("refused"), 1, "refused"), (EngineStartError("no memory"), 2, "no memory")],
    ids=["refused at once", "tried twice"],
)
async def test_values_that_do_not_start_are_put_aside(
    node: Node, tmp_path: Path, failure: Exception, tries: int, why: str
) -> None:
    await node.serving(1)
    node.document["host_budget"] = "32MiB"
    node.troubles.extend(tries * [failure])
    node.supervisor.restart(0.0, actor="ann")
    last = await node.serving(2 + tries)
    assert last.values.config.host_budget == 24 * 2**20
    status = node.supervisor.status()
    assert status.quarantined is not None
    assert status.quarantined.error == why
    aside = EngineRecord(tmp_path).put_aside
    assert aside is not None
    assert aside.error == why
    assert [one.wanted for one in status.quarantined.changes] == ["32MiB"]
    assert EventKind.ENGINE_QUARANTINED in node.kinds()


async def test_a_daemon_that_starts_with_values_put_aside_starts_the_last_good_ones(
    node: Node, tmp_path: Path
) -> None:
    await node.serving(1)
    node.document["host_budget"] = "32MiB"
    node.troubles = [UserError("refused")]
    node.supervisor.restart(0.0, actor="ann")
    await node.serving(3)
    await node.stop()
    later = Node(tmp_path)
    later.document["host_budget"] = "32MiB"
    later.begin()
    first = await later.serving(1)
    assert first.values.config.host_budget == 24 * 2**20
    assert later.supervisor.status().quarantined is not None
    assert later.kinds()[0] is EventKind.ENGINE_QUARANTINED
    await later.stop()


async def test_values_put_aside_are_tried_again_when_somebody_asks(node: Node) -> None:
    await node.serving(1)
    node.document["host_budget"] = "32MiB"
    node.troubles = [UserError("refused")]
    node.supervisor.restart(0.0, actor="ann")
    await node.serving(3)
    node.supervisor.restart(0.0, actor="ann")
    last = await node.serving(4)
    assert last.values.config.host_budget == 32 * 2**20
    assert node.supervisor.status().quarantined is None


async def test_a_stop_while_the_engine_starts_ends_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.hold_starts = True
    node.begin()
    await node.until(lambda: node.lives)
    assert await node.stop() is Outcome.STOPPED
    assert not node.supervisor.ever_served


async def test_a_mistake_of_the_daemon_leaves_no_engine(node: Node) -> None:
    first = await node.serving(1)
    first.died.set_exception(LookupError("a mistake"))
    with pytest.raises(LookupError, match="a mistake"):
        await asyncio.wait_for(node.running, 10)
    assert first.ended is False


async def test_clients_are_told_when_to_come_back(node: Node) -> None:
    await node.serving(1)
    node.hold_starts = True
    node.supervisor.restart(0.0, actor="ann")
    await node.until(lambda: len(node.lives) == 2)
    away = node.supervisor.away()
    assert (away.status, away.kind) == (503, "engine_unavailable")
    assert away.retry_after_s is not None
    assert 1 <= away.retry_after_s <= 60
    node.supervisor.ask_stop()
    await asyncio.wait_for(node.running, 10)
    assert node.supervisor.away().kind == "node_draining"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (lambda node: node.lives[0].died.set_result(Died("dead")), "engine_unavailable"),
        (lambda node: node.supervisor.restart(0.0, actor="ann"), "engine_unavailable"),
        (lambda node: (node.supervisor.ask_stop(), node.supervisor.ask_stop()), "node_draining"),
    ],
    ids=["dead engine", "restart at once", "second stop"],
)
async def test_calls_that_are_open_at_the_end_get_503(
    node: Node, end: Callable[[Node], object], kind: str
) -> None:
    await node.serving(1)
    transport = httpx.ASGITransport(app=node.gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        call = asyncio.create_task(http.post("/v1/completions", json={}))
        await node.until(lambda: node.gate.open_requests)
        end(node)
        answer = await asyncio.wait_for(call, 10)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == kind


async def test_a_call_that_ends_in_time_is_waited_for(node: Node) -> None:
    first = await node.serving(1)
    may_end = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    node.slot.put(slow, first.is_alive)
    transport = httpx.ASGITransport(app=node.gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        call = asyncio.create_task(http.post("/v1/completions", json={}))
        await node.until(lambda: node.gate.open_requests)
        node.supervisor.restart(5.0, actor="ann")
        assert node.state == "draining"
        assert (await http.post("/v1/completions", json={})).status_code == 503
        assert first.ended is None
        may_end.set()
        assert (await call).status_code == 200
    await node.serving(2)


async def test_nobody_watches_an_engine_that_was_taken_down(node: Node) -> None:
    first = await node.serving(1)
    node.supervisor.restart(0.0, actor="ann")
    await node.serving(2)
    assert first.died.cancelled(), "its end would be taken for that of the next one"
