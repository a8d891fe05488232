"""The supervisor with made-up engines: order, values, reports and records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.control.api.engine import EngineBusyError
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.document import (
    CanaryState,
    CanaryStatus,
    EngineStatus,
    Lifecycle,
    Status,
)
from hisparsed.errors import EngineStartError, MachineShortError, UserError
from hisparsed.node.engine.records import EngineRecord
from hisparsed.node.engine.start import StoppedWhileStarting
from hisparsed.node.engine.supervision import Died, Outcome
from hisparsed.node.engine.supervisor import Supervisor
from hisparsed.node.engine.values import EngineValues
from hisparsed.node.node import Node, build_node
from hisparsed.node.openai.background import BackgroundResponses
from hisparsed.node.openai.session_limit import Queue
from hisparsed.node.service import ServiceManager
from hisparsed.policy.events import EventKind

POLICY = "version: 1\n"


class MadeUpSession:
    """An engine that serves until the test ends it. ``trouble`` is what its start raises."""

    def __init__(self, values: EngineValues, trouble: Exception | None) -> None:
        self.values = values
        self.trouble = trouble
        self.may_serve = asyncio.Event()
        self.may_serve.set()
        self.died: asyncio.Future[Died] = asyncio.get_running_loop().create_future()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ended: bool | None = None
        self.latest = SimpleNamespace(outcome=None)
        self.background = BackgroundResponses(None)
        self.canary = SimpleNamespace(
            status=lambda: CanaryStatus(state=CanaryState.OK, sentence="equal")
        )
        self.on_tick = ()

    async def app(self, *_: object) -> None:
        """Answers no call before its engine's end."""
        await asyncio.Event().wait()

    def is_alive(self) -> bool:
        return not self.died.done()

    def queue(self) -> Queue:
        return Queue(0, 0, 8)

    async def begin(self, stop: asyncio.Event) -> MadeUpSession:
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self.may_serve.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in ends:
            one.cancel()
        if stop.is_set():
            raise StoppedWhileStarting
        if self.trouble is not None:
            raise self.trouble
        return self

    async def until_end(self) -> Died:
        return await self.died

    async def end(self, *, kill: bool) -> list[str]:
        await self.may_end.wait()
        self.ended = kill
        return ["EngineCore (pid 7) was killed by SIGKILL"]


class AnyDoctor:
    findings: tuple[()] = ()

    def look(self) -> tuple[()]:
        return ()


class Daemon:
    """A node with made-up engines. ``troubles`` of the starts to come, oldest first."""

    def __init__(self, folder: Path, **supervision: Any) -> None:
        self.folder = folder
        self.supervision = {"first_wait": "1ms", "longest_wait": "2ms", **supervision}
        (folder / "policy.yaml").write_text(POLICY)
        self.lives: list[MadeUpSession] = []
        self.troubles: list[Exception | None] = []
        self.hold_starts = False
        self.document: dict[str, Any] = {"host_budget": "24MiB"}
        self.told: list[bytes] = []
        self.node: Node
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

    def begin(self) -> Daemon:
        config = self.config()
        document = self.folder / "hisparsed.yaml"
        document.write_text(json.dumps({"host_budget": "24MiB"}))
        self.node = build_node(
            config,
            "reference",
            "any",
            PolicySource(config.policy, clock=lambda: 0.0, wall_clock=lambda: 0.0),
            EngineValues(config, 4.0),
            document=document,
            doctor=AnyDoctor(),
            manager=ServiceManager(self.told.append, watchdog_s=3.0, clock=lambda: 0.0),
            folder=self.folder,
        )
        start: Any = self._start
        self.supervisor = Supervisor(self.node, start, lambda: EngineValues(self.config(), 4.0))
        self.running = asyncio.create_task(self.supervisor.run())
        return self

    async def _start(self, values: EngineValues, _: int, stop: asyncio.Event) -> MadeUpSession:
        trouble = self.troubles.pop(0) if self.troubles else None
        self.lives.append(MadeUpSession(values, trouble))
        if self.hold_starts:
            self.lives[-1].may_serve.clear()
        return await self.lives[-1].begin(stop)

    def status(self) -> Status:
        return self.node.plane.status.status()

    def life(self) -> EngineStatus:
        return self.node.lifecycle.status()

    @property
    def state(self) -> str:
        return self.life().state.value

    def takes_calls(self) -> bool:
        return self.node.lifecycle.refusal() is None

    def lifecycle(self) -> Lifecycle:
        return self.node.plane.status.lifecycle

    def kinds(self) -> list[EventKind]:
        return [one.kind for one in reversed(self.node.plane.journal.recent_events(50))]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (many kinds of conditions)
                await asyncio.sleep(0.001)

    async def serving(self, lives: int) -> MadeUpSession:
        await self.until(lambda: len(self.lives) == lives and self.state == "serving")
        return self.lives[-1]

    async def stop(self) -> Outcome:
        self.supervisor.ask_stop()
        return await asyncio.wait_for(self.running, 10)


def read_json(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path).begin()
    yield daemon
    if not daemon.running.done():
        await daemon.stop()


async def test_calls_are_taken_only_while_an_engine_serves(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.hold_starts = True
    daemon.begin()
    await daemon.until(lambda: daemon.lives)
    assert daemon.lifecycle() is Lifecycle.STARTING
    assert daemon.node.plane.status.unready() is not None
    assert not daemon.takes_calls()
    daemon.lives[0].may_serve.set()
    await daemon.serving(1)
    assert daemon.takes_calls()
    assert daemon.lifecycle() is Lifecycle.SERVING
    assert b"READY=1\nSTATUS=Serving on http://127.0.0.1:8000" in daemon.told
    assert await daemon.stop() is Outcome.STOPPED
    assert not daemon.takes_calls()


async def test_a_dead_engine_is_ended_kept_as_evidence_and_replaced(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    first.died.set_result(Died("the engine core has died"))
    second = await daemon.serving(2)
    assert first.ended is False
    assert second.values.digest() == first.values.digest()
    turns = [kind for kind in daemon.kinds() if kind.startswith("engine-")]
    assert turns == ["engine-died", "engine-restarting", "engine-ready"]
    status = daemon.life()
    assert (status.died_total, status.restarts_total, status.ends_in_window) == (1, 1, 1)
    assert status.last_exit is not None
    assert status.last_exit.evidence is not None
    kept = read_json(status.last_exit.evidence)
    assert kept["why"] == "the engine core has died"
    assert kept["processes"] == ["EngineCore (pid 7) was killed by SIGKILL"]


async def test_evidence_that_cannot_be_written_is_told_and_stops_no_restart(
    daemon: Daemon, tmp_path: Path
) -> None:
    first = await daemon.serving(1)
    (tmp_path / "engine-ends").touch()
    first.died.set_result(Died("the engine core has died"))
    await daemon.serving(2)
    status = daemon.life()
    assert status.last_exit is not None
    assert status.last_exit.evidence is None
    told = [event.sentence for event in daemon.node.plane.journal.recent_events(9)]
    assert any("The evidence could not be written. The engine is started" in one for one in told)


async def test_an_engine_that_hangs_is_killed(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    first.died.set_result(Died("no report", hangs=True))
    await daemon.serving(2)
    assert first.ended is True
    assert "The engine hangs: no report" in daemon.node.plane.journal.recent_events(9)[-1].sentence


async def test_the_watchdog_waits_longer_while_the_engine_restarts(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    first.died.set_result(Died("dead"))
    await daemon.serving(2)
    spans = [int(one.partition(b"=")[2]) for one in daemon.told if one.startswith(b"WATCHDOG_USEC")]
    assert len(spans) == 2
    assert spans[0] > 3_000_000
    assert spans[1] == 3_000_000


async def test_too_many_deaths_give_up(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, most_restarts=1).begin()
    for number in (1, 2):
        (await daemon.serving(number)).died.set_result(Died("dead"))
    assert await asyncio.wait_for(daemon.running, 10) is Outcome.GIVEN_UP
    assert daemon.kinds()[-1] is EventKind.ENGINE_GONE
    assert daemon.lifecycle() is Lifecycle.ENGINE_GONE
    assert daemon.lives[-1].ended is False, "the last one was taken down too"


async def test_the_first_start_that_fails_raises_what_kept_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.troubles = [UserError("host_budget: too small")]
    daemon.begin()
    with pytest.raises(UserError, match="host_budget: too small"):
        await asyncio.wait_for(daemon.running, 10)
    assert len(daemon.lives) == 1


async def test_a_first_engine_that_was_killed_is_tried_again_and_kept_as_evidence(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path)
    how = "EngineCore (pid 7) was killed by SIGKILL"
    daemon.troubles = [EngineStartError(how, processes=[how], killed=True)]
    daemon.begin()
    await daemon.serving(2)
    end = daemon.life().last_exit
    assert end is not None
    assert end.processes == [how]
    assert end.evidence is not None
    assert read_json(end.evidence)["why"] == f"it did not start: {how}"
    assert EventKind.ENGINE_START_FAILED in daemon.kinds()
    await daemon.stop()


async def test_a_planned_restart_takes_new_values_and_keeps_them_as_the_good_ones(
    daemon: Daemon, tmp_path: Path
) -> None:
    await daemon.serving(1)
    daemon.document["host_budget"] = "32MiB"
    daemon.document["api"] = {"port": 8111}
    plan = daemon.supervisor.plan_restart(None)
    assert [one.key for one in plan.changes] == ["host_budget"]
    assert [one.key for one in plan.left] == ["api.port"]
    assert plan.drain_s == 5.0
    assert not plan.begun
    assert daemon.state == "serving", "a plan changes nothing"
    assert daemon.supervisor.restart(0.0, actor="ann").begun
    second = await daemon.serving(2)
    assert second.values.config.host_budget == 32 * 2**20
    assert second.values.config.api.port == 8000, "the daemon's own values stay"
    good = EngineRecord(tmp_path).good(daemon.config())
    assert good is not None
    assert good.digest() == second.values.digest()
    begun, ready = (one for one in daemon.node.plane.journal.recent_events(2)[::-1])
    assert (begun.actor, ready.actor) == ("ann", "ann")
    assert "host_budget 32MiB (was 24MiB)" in ready.sentence


async def test_a_second_restart_is_refused_while_one_goes_on(daemon: Daemon) -> None:
    await daemon.serving(1)
    daemon.hold_starts = True
    daemon.supervisor.restart(0.0, actor="ann")
    with pytest.raises(EngineBusyError, match="a restart cannot begin now"):
        daemon.supervisor.restart(0.0, actor="bob")
    await daemon.until(lambda: len(daemon.lives) == 2)
    with pytest.raises(EngineBusyError):
        daemon.supervisor.plan_restart(None)
    daemon.lives[-1].may_serve.set()
    await daemon.serving(2)


@pytest.mark.parametrize(
    ("failure", "tries", "why"),
    [(UserError("refused"), 1, "refused"), (EngineStartError("no memory"), 2, "no memory")],
    ids=["refused at once", "tried twice"],
)
async def test_values_that_do_not_start_are_quarantined(
    daemon: Daemon, tmp_path: Path, failure: Exception, tries: int, why: str
) -> None:
    await daemon.serving(1)
    daemon.document["host_budget"] = "32MiB"
    daemon.troubles.extend(tries * [failure])
    daemon.supervisor.restart(0.0, actor="ann")
    last = await daemon.serving(2 + tries)
    assert last.values.config.host_budget == 24 * 2**20
    status = daemon.life()
    assert status.quarantined is not None
    assert status.quarantined.error == why
    quarantined = EngineRecord(tmp_path).quarantined
    assert quarantined is not None
    assert quarantined.error == why
    assert [one.wanted for one in status.quarantined.changes] == ["32MiB"]
    assert EventKind.ENGINE_QUARANTINED in daemon.kinds()


async def test_values_are_not_quarantined_for_memory_that_was_short_once(daemon: Daemon) -> None:
    await daemon.serving(1)
    daemon.document["host_budget"] = "25MiB"
    daemon.troubles = [MachineShortError("host_budget: 25MiB, but 1MiB is free")]
    daemon.supervisor.restart(0.0, actor="ann")
    await daemon.serving(3)
    assert daemon.life().quarantined is None
    assert daemon.lives[-1].values.config.host_budget == 25 << 20


async def test_a_daemon_that_starts_with_values_quarantined_starts_the_last_good_ones(
    daemon: Daemon, tmp_path: Path
) -> None:
    await daemon.serving(1)
    daemon.document["host_budget"] = "32MiB"
    daemon.troubles = [UserError("refused")]
    daemon.supervisor.restart(0.0, actor="ann")
    await daemon.serving(3)
    await daemon.stop()
    later = Daemon(tmp_path)
    later.document["host_budget"] = "32MiB"
    later.begin()
    first = await later.serving(1)
    assert first.values.config.host_budget == 24 * 2**20
    assert later.life().quarantined is not None
    assert later.kinds()[0] is EventKind.ENGINE_QUARANTINED
    await later.stop()


async def test_values_quarantined_are_tried_again_when_somebody_asks(daemon: Daemon) -> None:
    await daemon.serving(1)
    daemon.document["host_budget"] = "32MiB"
    daemon.troubles = [UserError("refused")]
    daemon.supervisor.restart(0.0, actor="ann")
    await daemon.serving(3)
    daemon.supervisor.restart(0.0, actor="ann")
    last = await daemon.serving(4)
    assert last.values.config.host_budget == 32 * 2**20
    assert daemon.life().quarantined is None


async def test_a_stop_while_the_engine_starts_ends_the_start(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.hold_starts = True
    daemon.begin()
    await daemon.until(lambda: daemon.lives)
    assert await daemon.stop() is Outcome.STOPPED
    assert not daemon.supervisor.ever_served


async def test_a_mistake_of_the_daemon_leaves_no_engine(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    first.died.set_exception(LookupError("a mistake"))
    with pytest.raises(LookupError, match="a mistake"):
        await asyncio.wait_for(daemon.running, 10)
    assert first.ended is False


async def test_clients_are_told_when_to_come_back(daemon: Daemon) -> None:
    await daemon.serving(1)
    daemon.hold_starts = True
    daemon.supervisor.restart(0.0, actor="ann")
    await daemon.until(lambda: len(daemon.lives) == 2)
    away = daemon.node.lifecycle.away()
    assert (away.status, away.kind) == (503, "engine_unavailable")
    assert away.retry_after_s is not None
    assert 1 <= away.retry_after_s <= 60
    daemon.supervisor.ask_stop()
    await asyncio.wait_for(daemon.running, 10)
    assert daemon.node.lifecycle.away().kind == "node_draining"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (lambda daemon: daemon.lives[0].died.set_result(Died("dead")), "engine_unavailable"),
        (lambda daemon: daemon.supervisor.restart(0.0, actor="ann"), "engine_unavailable"),
        (
            lambda daemon: (daemon.supervisor.ask_stop(), daemon.supervisor.ask_stop()),
            "node_draining",
        ),
    ],
    ids=["dead engine", "restart at once", "second stop"],
)
async def test_calls_that_are_open_at_the_end_get_503(
    daemon: Daemon, end: Callable[[Daemon], object], kind: str
) -> None:
    await daemon.serving(1)
    transport = httpx.ASGITransport(app=daemon.node.admission)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        call = asyncio.create_task(http.post("/v1/completions", json={}))
        await daemon.until(lambda: daemon.node.admission.open_requests)
        end(daemon)
        answer = await asyncio.wait_for(call, 10)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == kind


async def test_a_call_that_ends_in_time_is_waited_for(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    may_end = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    first.app = slow  # type: ignore[method-assign]
    transport = httpx.ASGITransport(app=daemon.node.admission)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        call = asyncio.create_task(http.post("/v1/completions", json={}))
        await daemon.until(lambda: daemon.node.admission.open_requests)
        daemon.supervisor.restart(5.0, actor="ann")
        assert daemon.state == "draining"
        assert (await http.post("/v1/completions", json={})).status_code == 503
        assert first.ended is None
        may_end.set()
        assert (await call).status_code == 200
    await daemon.serving(2)


async def test_nobody_watches_an_engine_that_was_taken_down(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    daemon.supervisor.restart(0.0, actor="ann")
    await daemon.serving(2)
    assert first.died.cancelled(), "its end would be taken for that of the next one"


async def test_between_engines_nothing_of_the_dead_one_is_shown(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    assert daemon.status().canary is not None
    first.may_end.clear()
    daemon.hold_starts = True
    first.died.set_result(Died("dead"))
    await daemon.until(lambda: daemon.state == "restarting")
    await daemon.until(lambda: daemon.node.session is None)
    assert daemon.status().canary is None, "its processes end"
    first.may_end.set()
    await daemon.until(lambda: len(daemon.lives) == 2)
    assert daemon.status().canary is None, "the next one starts"
    kept = read_json(daemon.life().last_exit.evidence)  # type: ignore[union-attr, arg-type]
    assert kept["status"]["canary"]["state"] == "ok", "the evidence has what it was"
    daemon.lives[1].may_serve.set()
    await daemon.serving(2)
    assert daemon.status().canary is not None


async def test_a_daemon_that_fails_while_an_engine_ends_still_ends_it(daemon: Daemon) -> None:
    first = await daemon.serving(1)
    first.may_end.clear()
    first.died.set_result(Died("dead"))
    await daemon.until(lambda: daemon.node.session is None)
    daemon.running.cancel()
    first.may_end.set()
    await asyncio.gather(daemon.running, return_exceptions=True)
    assert first.ended is False
