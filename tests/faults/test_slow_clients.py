"""Clients that are slow on purpose: each is told, or let go, and takes nobody else's place."""

from __future__ import annotations

import asyncio

from edge import LONG_S, SHORT, Edge, request

from hisparsed.control.http_limits import Cut, HttpLimits

POST = b"POST /v1/completions HTTP/1.1\r\nhost: node\r\n"


async def drip(edge: Edge, head: bytes) -> None:
    """A byte now and then, for ever; until the server has had enough."""
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
    assert edge.gate.open_requests == 0


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
    assert edge.gate.open_requests == 0


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
    assert edge.gate.open_requests == 0


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
