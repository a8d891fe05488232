"""More connections than there is room for: others are served, and who waits for an answer stays."""

from __future__ import annotations

import asyncio
import resource
import socket

import pytest
from edge import Client, Edge, request

from hisparsed.config.api_limits import ApiLimits
from hisparsed.control.http_limits import Connections, Cut, HttpLimits
from hisparsed.daemon.edge import connections_of

IDLE = 10_000


def raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine lets a process open {hard} files, {wanted} are needed")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def test_ten_thousand_idle_connections_keep_nobody_out() -> None:
    limits = HttpLimits(connections=4_096, header_s=60.0)
    raise_file_limit(IDLE + limits.connections + 1_000)
    edge = Edge(limits)
    await edge.start()
    loop = asyncio.get_running_loop()
    edge.hold.clear()
    waiting = await edge.client()
    await waiting.send(request("POST", "/v1/completions", b"{}"))
    await edge.asked.acquire()
    idle = []
    for _ in range(IDLE):
        one = socket.socket()
        one.setblocking(False)
        await loop.sock_connect(one, ("127.0.0.1", edge.port))
        idle.append(one)
    edge.hold.set()
    assert (await waiting.answer()).status == 200, "who waited for an answer was let go"
    for _ in range(20):
        assert (await edge.ask()).status == 200
    assert edge.connections.open <= limits.connections
    assert edge.connections.cut[Cut.MADE_ROOM] >= IDLE - limits.connections
    for one in idle:
        one.close()
    await edge.stop()


async def test_where_everybody_waits_for_an_answer_the_next_one_is_told() -> None:
    edge = Edge(HttpLimits(connections=4))
    await edge.start()
    edge.hold.clear()
    waiting: list[Client] = []
    for _ in range(4):
        waiting.append(await edge.client())
        await waiting[-1].send(request("POST", "/v1/completions", b"{}"))
        await edge.asked.acquire()
    late = await edge.client()
    refused = await late.answer()
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.error["type"] == "too_many_connections"
    edge.hold.set()
    assert [(await one.answer()).status for one in waiting] == [200] * 4
    assert (await edge.ask()).status == 200, "their connections rest now, and one makes room"
    assert edge.connections.cut[Cut.FULL] == 1
    await edge.stop()
    assert edge.connections.open == 0


class One:
    """A connection in the books."""

    def __init__(self) -> None:
        self.went = False

    def make_room(self) -> None:
        self.went = True


def test_who_has_been_idle_for_longest_makes_room() -> None:
    books = Connections(HttpLimits(connections=3))
    first, second, third, fourth = (One() for _ in range(4))
    assert all(books.admit(one) for one in (first, second, third))
    books.waits_for_answer(first)
    books.waits_for_answer(second)
    books.waits_for_client(second)
    assert books.admit(fourth)
    assert [one.went for one in (first, second, third)] == [False, False, True]
    assert books.open == 3


def test_a_connection_that_is_answered_never_makes_room() -> None:
    books = Connections(HttpLimits(connections=1))
    first = One()
    assert books.admit(first)
    books.waits_for_answer(first)
    assert not books.admit(One())
    books.leave(first)
    assert books.open == 0
    assert books.admit(One())


def test_no_more_connections_than_files_may_be_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 3_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert connections_of(ApiLimits(connections=4_096)).limits.connections == 1_976
    assert asked == [(3_000, 3_000)]
    assert "LimitNOFILE" in caplog.text
    assert connections_of(ApiLimits(connections=100)).limits.connections == 100
