"""Clients that are broken, slow, many or not allowed: answered or let go; others are served."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import socket

import pytest
from edge import LONG_S, SHORT, Client, Edge, request

from hisparsed.config.sections import ApiLimits
from hisparsed.control.api.http_server import HEADER_BYTES, Connections, Cut, HttpLimits
from hisparsed.logs.privacy import without_text
from hisparsed.node.openai.server import connections_of

MALFORMED = {
    "no request line": b"\x00\x01\x02\x03\r\n\r\n",
    "a word": b"hello\r\n\r\n",
    "an unknown version": b"GET / HTTP/9.9\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f4030354"),
    "a null byte in a header": b"GET /v1/models HTTP/1.1\r\nhost: no\x00de\r\n\r\n",
    "a null byte in a name": b"GET /v1/models HTTP/1.1\r\nho\x00st: node\r\n\r\n",
    "a header without a colon": b"GET /v1/models HTTP/1.1\r\nhost node\r\n\r\n",
    "a space before the colon": b"GET /v1/models HTTP/1.1\r\nhost : node\r\n\r\n",
    "a target that is no path": b"GET http://[ HTTP/1.1\r\nhost: node\r\n\r\n",
    "a target beyond ASCII": b"GET /\xff\xfe HTTP/1.1\r\nhost: node\r\n\r\n",
    "a length that is not a number": b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}"
    ),
    "a length and chunks": (
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
    ),
    "an unknown coding": (
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked, gzip\r\n\r\n"
    ),
    "a chunk size that is not a number": (
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n"
    ),
    "a chunk longer than it says": (
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{}}}\r\n"
    ),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_is_no_http_is_refused_and_reaches_nobody(edge: Edge, sent: bytes) -> None:
    client = await edge.client()
    await client.send(sent)
    answer = await client.answer()
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    assert answer.error["type"] == "bad_request"
    assert await client.rest() == b""
    assert edge.calls == []
    assert edge.connections.cut[Cut.MALFORMED] == 1
    assert edge.connections.open == 0
    assert (await edge.ask()).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 2 * HEADER_BYTES,
        b"GET /v1/models?" + b"a" * 2 * HEADER_BYTES,
        b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * HEADER_BYTES,
        b"GET /v1/models HTTP/1.1\r\n" + b"x: " + b"a" * (HEADER_BYTES + 9) + b"\r\n\r\n",
    ],
    ids=["one value without end", "a target without end", "many headers", "whole, but too large"],
)
async def test_headers_beyond_the_bound_are_431(edge: Edge, head: bytes) -> None:
    client = await edge.client()
    await client.send(head)
    assert (await client.answer()).status == 431
    assert edge.connections.cut[Cut.HEADERS_TOO_LARGE] == 1
    assert edge.calls == []


async def test_headers_within_the_bound_pass(edge: Edge) -> None:
    long = "x: " + "a" * (HEADER_BYTES - 1_000)
    assert (await edge.ask(headers=(long,))).status == 200


async def test_a_body_shorter_than_it_says_is_no_call(edge: Edge) -> None:
    client = await edge.client()
    await client.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{}")
    client.writer.write_eof()
    assert await client.rest() == b"", "who hangs up is not answered"
    assert edge.calls == []
    assert edge.admission.open_requests == 0


async def test_what_follows_a_body_is_no_part_of_it(edge: Edge) -> None:
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}") + b"junk\r\n\r\n")
    assert (await client.answer()).status == 400
    assert [body for _, _, body in edge.calls] in ([], [b"{}"])


async def test_an_upgrade_is_answered_as_the_request_that_it_also_is(edge: Edge) -> None:
    for upgrade in ("websocket", "h2c"):
        answer = await edge.ask(headers=("connection: upgrade", f"upgrade: {upgrade}"))
        assert answer.status == 200


@pytest.mark.parametrize("cut", [0, 1, 9])
async def test_a_body_is_read_although_the_client_asks_for_http_2(edge: Edge, cut: int) -> None:
    """Whether it comes with its headers or later, and as the next requests of the connection."""
    client = await edge.client()
    asks = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    for _ in range(2):
        sent = request("POST", "/v1/completions", b'{"a": 1}', headers=asks)
        await client.send(sent[: len(sent) - cut])
        await client.send(sent[len(sent) - cut :])
        assert (await client.answer()).status == 200
    assert edge.calls == [("POST", "/v1/completions", b'{"a": 1}')] * 2


async def test_a_tunnel_is_refused(edge: Edge) -> None:
    client = await edge.client()
    await client.send(b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere\r\n\r\n")
    assert (await client.answer()).status == 400
    assert edge.calls == []


async def test_pipelined_requests_are_answered_in_order(edge: Edge) -> None:
    client = await edge.client()
    paths = [f"/v1/models/{number}" for number in range(20)]
    await client.send(b"".join(request(path=path) for path in paths))
    assert [(await client.answer()).status for _ in paths] == [200] * 20
    assert [path for _, path, _ in edge.calls] == paths


async def test_no_bytes_at_random_bring_the_server_down(edge: Edge) -> None:
    chance = random.Random(7)
    whole = request("POST", "/v1/completions", json.dumps({"prompt": "x" * 50}).encode())
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        client = await edge.client()
        await client.send(bytes(damaged))
        client.writer.write_eof()
        answer = await client.rest()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer
        assert not answer.startswith(b"HTTP/1.1 5"), damaged
    assert (await edge.ask()).status == 200


POST = b"POST /v1/completions HTTP/1.1\r\nhost: node\r\n"


async def drip(edge: Edge, head: bytes) -> None:
    """A byte now and then, until the server closes the connection."""
    client = await edge.client()
    await client.send(head)
    answering = asyncio.ensure_future(client.answer())
    while not answering.done():
        try:
            await client.send(b"a")
        except ConnectionError:
            break
        await asyncio.wait({answering}, timeout=0.02)
    answer = await answering
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    assert answer.error["type"] == "request_timeout"
    assert await client.rest() == b""


async def let_time_pass(edge: Edge) -> None:
    """Until one who asks nothing was let go five times: longer than every other limit."""
    for _ in range(5):
        await (await edge.client()).rest()


async def test_headers_that_drip_are_408_in_their_time(edge: Edge) -> None:
    await drip(edge, b"GET /v1/models HTTP/1.1\r\nx-slow: ")
    assert edge.connections.cut[Cut.SLOW_HEADERS] == 1
    assert edge.calls == []
    assert (await edge.ask()).status == 200


async def test_a_body_that_drips_is_408_in_its_time_whatever_comes_meanwhile(edge: Edge) -> None:
    await drip(edge, POST + b"content-length: 100000\r\n\r\n{")
    assert edge.connections.cut[Cut.SLOW_BODY] == 1
    assert edge.calls == [], "the application saw a call that was not whole"
    assert edge.admission.open_requests == 0


async def test_a_body_that_drips_in_chunks_is_no_different(edge: Edge) -> None:
    client = await edge.client()
    await client.send(POST + b"transfer-encoding: chunked\r\n\r\n")
    await client.send(b"1\r\n{\r\n")
    assert (await client.answer()).status == 408


async def test_who_connects_and_asks_nothing_is_let_go(edge: Edge) -> None:
    client = await edge.client()
    assert await client.rest() == b""
    assert edge.connections.cut[Cut.NEVER_ASKED] == 1
    assert edge.connections.open == 0


async def test_a_connection_that_is_kept_alive_is_closed_when_it_rests_too_long(
    edge: Edge,
) -> None:
    client = await edge.client()
    for _ in range(3):
        await client.send(request())
        assert (await client.answer()).status == 200
    assert await client.rest() == b""
    assert not any(edge.connections.cut.values()), "resting is no offence"


async def test_an_answer_that_takes_longer_than_every_limit_is_waited_for(edge: Edge) -> None:
    edge.hold.clear()
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}"))
    await let_time_pass(edge)
    edge.hold.set()
    assert (await client.answer()).status == 200


async def test_a_second_request_that_drips_does_not_cut_the_first_one_s_answer(
    edge: Edge,
) -> None:
    edge.hold.clear()
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}") + b"GET /v1/mod")
    await let_time_pass(edge)
    edge.hold.set()
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 408, "its own time counts from then"


async def test_a_client_that_reads_nothing_of_its_stream_ends_its_call() -> None:
    edge = Edge(SHORT, stream_bytes=65_536)
    await edge.start()
    client = await edge.client()
    client.writer.transport.pause_reading()
    await client.send(request("POST", "/v1/completions", b"{}"))
    async with asyncio.timeout(LONG_S):
        await edge.gone.wait()
    assert edge.connections.cut[Cut.SLOW_READER] == 1
    await edge.stop()
    assert edge.admission.open_requests == 0


async def test_a_client_that_goes_away_in_its_stream_ends_its_call() -> None:
    edge = Edge(HttpLimits(), stream_bytes=16)
    await edge.start()
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}"))
    await client.reader.readexactly(64)
    client.writer.transport.abort()
    async with asyncio.timeout(LONG_S):
        await edge.gone.wait()
    await edge.stop()
    assert edge.admission.open_requests == 0


async def test_who_has_no_key_is_not_read_for_ever() -> None:
    edge = Edge(SHORT, api_keys=("one",))
    await edge.start()
    client = await edge.client()
    await client.send(POST + b"content-length: 1000\r\n\r\n{")
    assert (await client.answer()).status == 408
    await edge.stop()
    assert edge.calls == []


async def test_rubbish_after_a_request_is_not_answered_into_its_stream() -> None:
    edge = Edge(HttpLimits(), stream_bytes=16)
    await edge.start()
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}"))
    await client.reader.readexactly(64)
    await client.send(b"\x00\x01\x02")
    assert b"HTTP/1.1" not in await client.rest()
    async with asyncio.timeout(LONG_S):
        await edge.gone.wait()
    await edge.stop()


IDLE = 10_000


def raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine lets a process open {hard} files, {wanted} are needed")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@pytest.mark.long
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


KEY = "authorization: Bearer one"


@pytest.fixture
async def guarded() -> Edge:
    return Edge(SHORT, api_keys=("one",))


async def test_a_stranger_does_not_learn_which_paths_there_are(guarded: Edge) -> None:
    await guarded.start()
    for path in ("/v1/models", "/collective_rpc", "/nowhere"):
        assert (await guarded.ask(path=path)).status == 401
    assert (await guarded.ask(path="/health")).status == 200
    await guarded.stop()
    assert [path for _, path, _ in guarded.calls] == ["/health"]


async def test_who_has_a_key_reaches_the_listed_paths_alone(guarded: Edge) -> None:
    await guarded.start()
    assert (await guarded.ask(path="/v1/models", headers=(KEY,))).status == 200
    for path in ("/collective_rpc", "/v1/../sleep", "/sleep", "/%73leep"):
        refused = await guarded.ask("POST", path, headers=(KEY,), body=b"{}")
        assert (refused.status, refused.error["type"]) == (404, "not_found")
    await guarded.stop()
    assert [path for _, path, _ in guarded.calls] == ["/v1/models"]


async def test_no_answer_says_what_serves_it(guarded: Edge) -> None:
    await guarded.start()
    answer = await guarded.ask(path="/v1/models", headers=(KEY,))
    assert "server" not in answer.headers
    await guarded.stop()


async def test_what_is_logged_for_a_client_is_not_quoted(guarded: Edge) -> None:
    logged: list[str] = []

    def look() -> None:
        record = logging.LogRecord("some.library", logging.ERROR, "f", 1, "%s", ("text",), None)
        logged.append(without_text(record).getMessage())

    guarded.while_asked = look
    await guarded.start()
    await guarded.ask(path="/v1/models", headers=(KEY,))
    await guarded.stop()
    look()
    assert logged == ["<str>", "text"]
