"""Bytes that are no HTTP/1.1: 400 or 431, a closed connection, and nothing for the application."""

from __future__ import annotations

import json
import random

import pytest
from edge import Edge, request

from hisparsed.control.http_limits import HEADER_BYTES, Cut

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
    "a length that is no number": b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
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
    "a chunk size that is no number": (
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
    assert edge.gate.open_requests == 0


async def test_what_follows_a_body_is_no_part_of_it(edge: Edge) -> None:
    client = await edge.client()
    await client.send(request("POST", "/v1/completions", b"{}") + b"junk\r\n\r\n")
    assert (await client.answer()).status == 400
    assert [body for _, _, body in edge.calls] in ([], [b"{}"])


async def test_an_upgrade_is_answered_as_the_request_that_it_also_is(edge: Edge) -> None:
    for upgrade in ("websocket", "h2c"):
        answer = await edge.ask(headers=("connection: upgrade", f"upgrade: {upgrade}"))
        assert answer.status == 200


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
