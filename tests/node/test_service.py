"""The notify protocol against a real socket: what is said when, and when the watchdog starves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.node import service
from hisparsed.node.engine.values import engine_stop_s, start_limit_s
from hisparsed.node.service import ServiceManager, service_manager

PID = 4242


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Listener:
    """systemd's socket; nothing is read while messages are sent, so a few must fit."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
        messages = []
        while True:
            try:
                lines = self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in lines))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(str(tmp_path / "notify"))
    yield listener
    listener.close()


@pytest.fixture
def manager(tmp_path: Path, listener: Listener, clock: Clock) -> ServiceManager:
    environment = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "180000000",
        "WATCHDOG_PID": str(PID),
    }
    return service_manager(environment, pid=PID, clock=clock)


def test_ready_says_what_is_served(manager: ServiceManager, listener: Listener) -> None:
    manager.ready("Serving on http://127.0.0.1:8000")
    assert listener.heard() == [{"READY": "1", "STATUS": "Serving on http://127.0.0.1:8000"}]


def test_an_abstract_address_is_understood(clock: Clock) -> None:
    listener = Listener("\0hisparsed-test-notify")
    try:
        environment = {"NOTIFY_SOCKET": "@hisparsed-test-notify"}
        service_manager(environment, pid=PID, clock=clock).status("here")
        assert listener.heard() == [{"STATUS": "here"}]
    finally:
        listener.close()


def test_the_engine_does_not_inherit_the_managers_address(clock: Clock) -> None:
    environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "A": "b"}
    service_manager(environment, pid=PID, clock=clock)
    assert environment == {"A": "b"}


def test_without_a_manager_nothing_happens(clock: Clock) -> None:
    manager = service_manager({}, pid=PID, clock=clock)
    assert manager.watchdog_s is None
    manager.ready("Serving")
    manager.feed(1.0)


def test_a_watchdog_of_another_process_is_not_fed(tmp_path: Path, clock: Clock) -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert service_manager(environment, pid=PID, clock=clock).watchdog_s is None


def test_a_manager_that_went_away_stops_nobody(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hisparsed.daemon")
    logging.getLogger("hisparsed").propagate = True
    manager = service_manager({"NOTIFY_SOCKET": str(tmp_path / "gone")}, pid=PID, clock=clock)
    manager.ready("Serving")
    assert "cannot be notified of READY=1" in caplog.text


def test_ticks_with_new_reports_feed_the_watchdog_four_times_in_its_time(
    manager: ServiceManager, listener: Listener, clock: Clock
) -> None:
    for _ in range(181):
        manager.feed(clock.now_s)
        clock.now_s += 1
    assert listener.heard() == [{"WATCHDOG": "1"}] * 5  # at 0, 45, 90, 135 and 180 s


def test_an_engine_that_does_not_answer_starves_the_watchdog(
    manager: ServiceManager, listener: Listener, clock: Clock
) -> None:
    manager.feed(clock.now_s)
    last_report_s = clock.now_s
    listener.heard()
    for _ in range(300):
        clock.now_s += 1
        manager.feed(last_report_s)
    assert listener.heard() == []
    manager.feed(clock.now_s)
    assert listener.heard() == [{"WATCHDOG": "1"}]


def test_a_reload_is_framed_and_ends_ready_even_when_it_fails(
    manager: ServiceManager, listener: Listener
) -> None:
    with pytest.raises(ValueError, match="bad policy"), manager.reloading():
        raise ValueError("bad policy")
    assert listener.heard() == [{"RELOADING": "1", "MONOTONIC_USEC": "100000000"}, {"READY": "1"}]


def test_stopping_lengthens_the_watchdog_for_the_way_to_the_end(
    manager: ServiceManager, listener: Listener
) -> None:
    manager.stopping("Draining", within_s=600)
    manager.stopping("Stopping the engine", within_s=20)
    usec = [message["WATCHDOG_USEC"] for message in listener.heard() if "WATCHDOG_USEC" in message]
    assert usec == ["600000000", "180000000"]


async def test_a_busy_start_asks_for_time_until_its_limit(
    manager: ServiceManager,
    listener: Listener,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_reached = asyncio.Event()

    async def pass_time(seconds: float) -> None:
        clock.now_s += seconds
        if clock.now_s >= 100 + 35:
            limit_reached.set()

    monkeypatch.setattr(service.asyncio, "sleep", pass_time)
    async with manager.busy("Starting the engine", at_most_s=35):
        await limit_reached.wait()
    heard = listener.heard()
    assert [one["EXTEND_TIMEOUT_USEC"] for one in heard] == ["40000000"] * 4
    assert heard[1]["STATUS"] == "Starting the engine (10s of at most 35s)"


async def test_nothing_is_asked_for_once_the_work_is_done(
    manager: ServiceManager, listener: Listener
) -> None:
    async with manager.busy("Starting the engine", at_most_s=60):
        await asyncio.sleep(0)
    listener.heard()
    assert len(asyncio.all_tasks()) == 1
    assert listener.heard() == []


def test_patience_grows_with_the_memory_that_is_pinned() -> None:
    def node(gib: int, ranks: int = 1) -> NodeConfig:
        document = {"node": "cuda", "model": "any"}
        cuda = {"tensor_parallel_size": ranks}
        return NodeConfig.model_validate(document | {"host_budget": f"{gib}GiB", "cuda": cuda})

    assert start_limit_s(node(701)) - start_limit_s(node(1)) >= 12 * 60, "it took 12 minutes"
    assert engine_stop_s(node(1)) == 20.5
    assert engine_stop_s(node(1536)) >= 600
    for limit_s in (start_limit_s, engine_stop_s):
        more_s = limit_s(node(512, 8)) - limit_s(node(512))
        assert more_s >= 7 * 0.1 * 512, "each further rank registers all of it too"
