"""The doctor of a serving node: when it checks, what it reports, and a check that hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from hisparsed.control.api.socket import ControlServer
from hisparsed.control.doctor import LOOK_EVERY_S, DoctorApi, DoctorBusyError, DoctorWatch
from hisparsed.control.events import EventRecorder
from hisparsed.control.status.document import DoctorFinding, Severity
from hisparsed.control.text.status import status_page

START_S = 1_700_000_100.0


def finding(check: str, severity: Severity = Severity.WARNING, what: str = "") -> DoctorFinding:
    return DoctorFinding(
        check=check,
        severity=severity,
        what=what or f"{check} is wrong",
        fix=f"mend {check}",
        seen_unix_s=START_S,
    )


WELL = finding("clock", Severity.OK)


class ScriptedDoctor:
    """Finds ``next``, in whatever thread it is asked; waits where ``gate`` is not set."""

    def __init__(self, *findings: DoctorFinding) -> None:
        self.findings: Sequence[DoctorFinding] = findings
        self.next: Sequence[DoctorFinding] | Exception = findings
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[threading.Thread] = []
        self.hang: Callable[[], None] = self.gate.clear

    def look(self) -> Sequence[DoctorFinding]:
        self.threads.append(threading.current_thread())
        self.gate.wait(20)
        if isinstance(self.next, Exception):
            raise self.next
        return self.next


Watch = Callable[..., DoctorWatch]


@pytest.fixture
def watched(node: Any) -> Watch:
    def make(doctor: ScriptedDoctor, limit_s: float = 20.0) -> DoctorWatch:
        watch = DoctorWatch(
            doctor,
            EventRecorder(node.journal, node.broadcast, wall_clock=node.clock.wall),
            clock=node.clock.monotonic,
            wall_clock=node.clock.wall,
            limit_s=limit_s,
        )
        node.doctor = watch.status
        return watch

    return make


def events(node: Any) -> list[tuple[str, str]]:
    """Oldest first: kind and actor."""
    return [(one.kind, one.actor) for one in reversed(node.journal.recent_events(20))]


async def test_what_was_found_before_the_start_is_told_worst_first(
    node: Any, watched: Watch
) -> None:
    note, warning = finding("numa", Severity.NOTE), finding("leaked-memory")
    fatal = finding("memlock", Severity.FATAL)
    status = watched(ScriptedDoctor(WELL, note, warning, fatal)).status()
    assert status.findings == [fatal, warning, note]
    assert (status.fatal, status.warnings, status.checks) == (1, 1, 4)
    assert status.at_unix_s == START_S
    assert events(node) == [("doctor-found", "daemon")] * 2, "a note is no news"
    text = status_page(node.current.status(), width=200)
    assert "doctor     1 fatal, 1 warning of 4 checks" in text
    assert "FATAL    memlock: memlock is wrong; fix: mend memlock" in text


async def test_it_looks_again_when_time_has_passed_and_beside_the_event_loop(
    node: Any, watched: Watch
) -> None:
    doctor = ScriptedDoctor(WELL)
    watch = watched(doctor)
    node.on_tick.append(watch.watch)
    await node.loop.start()
    node.clock.now_s += LOOK_EVERY_S - 1
    await node.ticks(1)
    assert doctor.threads == []
    doctor.next = [WELL, finding("journal-disk")]
    await node.ticks(1)
    assert watch.status().looking
    status = await watch.look(actor="ada")
    assert not status.looking
    assert [one.check for one in status.findings] == ["journal-disk"]
    assert status.at_unix_s > START_S
    assert len(doctor.threads) == 1, "who asks during a look gets that one"
    assert doctor.threads[0] is not threading.main_thread()
    assert events(node)[-1] == ("doctor-found", "daemon")


async def test_news_are_told_once_and_also_when_they_are_over(node: Any, watched: Watch) -> None:
    doctor = ScriptedDoctor(WELL)
    watch = watched(doctor)
    for free in ("3GiB", "2GiB"):
        doctor.next = [WELL, finding("journal-disk", what=f"{free} free")]
        await watch.look(actor="ada")
    assert events(node) == [("doctor-found", "ada")]
    assert watch.status().findings[0].what == "2GiB free"
    doctor.next = [WELL, finding("journal-disk", Severity.FATAL)]
    await watch.look(actor="ada")
    doctor.next = [WELL]
    await watch.look(actor="bob")
    assert events(node)[1:] == [("doctor-found", "ada"), ("doctor-cleared", "bob")]


async def test_a_look_that_fails_keeps_what_was_found(node: Any, watched: Watch) -> None:
    doctor = ScriptedDoctor(finding("leaked-memory"))
    watch = watched(doctor)
    doctor.next = OSError("no /dev/shm")
    status = await watch.look(actor="ada")
    assert status.error == "the machine could not be checked: OSError: no /dev/shm"
    assert [one.check for one in status.findings] == ["leaked-memory"]
    assert "TROUBLE  the machine could not" in status_page(node.current.status(), width=200)
    doctor.next = [WELL]
    assert (await watch.look(actor="ada")).error is None


async def test_a_look_that_hangs_is_told_and_not_made_twice(node: Any, watched: Watch) -> None:
    doctor = ScriptedDoctor(WELL)
    watch = watched(doctor, limit_s=0.01)
    doctor.gate.clear()
    for _ in range(2):
        with pytest.raises(DoctorBusyError, match=r"has not returned for 0\.01s"):
            await watch.look(actor="ada")
    assert len(doctor.threads) == 1
    assert not watch.status().looking
    doctor.gate.set()
    await asyncio.to_thread(doctor.threads[0].join)
    watch._limit_s = 20.0
    assert (await watch.look(actor="ada")).error is None


@pytest.fixture
async def http(node: Any, watched: Watch) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    doctor = ScriptedDoctor(WELL, finding("leaked-memory"))
    watch = watched(doctor)

    def hang() -> None:
        watch._limit_s = 0.01
        doctor.gate.clear()

    doctor.hang = hang
    routes = DoctorApi(watch).routes()
    api = dataclasses.replace(node.api, more_routes=routes)
    path = node.folder / "control.sock"
    server = ControlServer(api.application(), path, end_streams=node.broadcast.close)
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client, doctor
    await server.stop()


async def test_the_api_shows_and_asks(node: Any, http: tuple[httpx.AsyncClient, Any]) -> None:
    client, doctor = http
    shown = (await client.get("/v1/doctor")).json()
    assert [one["check"] for one in shown["findings"]] == ["leaked-memory"]
    assert (await client.get("/v1/status")).json()["doctor"] == shown
    doctor.next = [WELL]
    ran = await client.post("/v1/doctor/run", json={"actor": "ada"})
    assert (ran.status_code, ran.json()["findings"]) == (200, [])
    kind, actor = events(node)[-1]
    assert (kind, actor.split(" ")[0]) == ("doctor-cleared", "ada")


async def test_the_api_refuses_who_does_not_say_who_asks_and_a_look_that_hangs(
    http: tuple[httpx.AsyncClient, Any],
) -> None:
    client, doctor = http
    assert (await client.post("/v1/doctor/run", json={})).status_code == 400
    assert doctor.threads == []
    doctor.hang()
    hangs = await client.post("/v1/doctor/run", json={"actor": "ada"})
    doctor.gate.set()
    assert (hangs.status_code, hangs.json()["error"]["code"]) == (503, "not_ready")
