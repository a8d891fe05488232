"""Measuring one call: times, retries, error kinds, what is sent."""

import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from hisparsed.replay.client import (
    Clock,
    CompletionClient,
    OutgoingCall,
    RequestSettings,
    retry_after_s,
)
from hisparsed.replay.results import CallResult

CALL = OutgoingCall("s1", 4, [1, 2, 3], 3, 2)
DONE = "data: [DONE]\n\n"


def token(*ids: int) -> str:
    return f"data: {json.dumps({'choices': [{'text': 'x', 'token_ids': list(ids)}]})}\n\n"


class TimedStream(httpx.AsyncByteStream):
    """Sends each piece its seconds after the one before; an exception as a piece is raised."""

    def __init__(self, clock: Clock, pieces: list[tuple[float, str | Exception]]) -> None:
        self._clock = clock
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause_s, piece in self._pieces:
            await self._clock.sleep(pause_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece.encode()


Answer = httpx.Response | list[tuple[float, str | Exception]] | Exception


@pytest.fixture
def complete(clock: Clock) -> Callable[..., Any]:
    """Sends CALL to a server with these answers, in order; returns the result and what it saw."""

    async def run(*answers: Answer, **settings: Any) -> tuple[CallResult, list[httpx.Request]]:
        left, seen = list(answers), []

        def handle(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, httpx.Response):
                return answer
            return httpx.Response(200, stream=TimedStream(clock, answer))

        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as http:
            client = CompletionClient(http, clock, RequestSettings("m", **settings), 990.0)
            return await client.complete(CALL), seen

    return run


def busy(**headers: str) -> httpx.Response:
    return httpx.Response(429, headers=headers, text="full")


GOOD: list[tuple[float, str | Exception]] = [(0.0, token(7)), (0.0, DONE)]


@pytest.mark.asyncio
async def test_times_count_from_the_first_attempt(complete: Callable[..., Any]) -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    last = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    pieces = [(1.5, token(5)), (0.25, token(6)), (0.5, token(7, 8)), (0.125, last + DONE)]
    result, _ = await complete(pieces)
    assert (result.error, result.ttft_s, result.itl_s) == (None, 1.5, (0.25, 0.5))
    assert (result.started_s, result.seconds) == (10.0, 2.375)
    assert (result.prompt_tokens, result.completion_tokens, result.prefix_hit_tokens) == (3, 4, 2)


@pytest.mark.asyncio
async def test_without_usage_tokens_are_counted_and_hits_unknown(
    complete: Callable[..., Any],
) -> None:
    result, _ = await complete([(0.0, token(5, 6)), (0.0, token(7)), (0.0, DONE)])
    assert (result.prompt_tokens, result.completion_tokens, result.prefix_hit_tokens) == (
        3,
        3,
        None,
    )


@pytest.mark.asyncio
async def test_retry_after_is_honoured_and_counted(complete: Callable[..., Any]) -> None:
    result, seen = await complete(busy(**{"retry-after": "7"}), busy(**{"retry-after": "0"}), GOOD)
    assert (result.error, result.retries, result.retry_wait_s) == (None, 2, 7.0)
    assert (result.ttft_s, len(seen)) == (7.0, 3)


@pytest.mark.asyncio
async def test_without_retry_after_pauses_grow(complete: Callable[..., Any]) -> None:
    unavailable = httpx.Response(503)
    result, _ = await complete(unavailable, busy(), busy(), GOOD)
    assert (result.error, result.retries, result.retry_wait_s) == (None, 3, 0.5 + 1.0 + 2.0)


@pytest.mark.asyncio
async def test_retries_end(complete: Callable[..., Any]) -> None:
    result, seen = await complete(busy(), busy(), busy(), busy_retries=2)
    assert (result.error, result.detail, result.retries) == ("http_429", "full", 2)
    assert len(seen) == 3


def test_retry_after_takes_dates_and_ignores_nonsense() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    values = ["Thu, 01 Jan 2026 12:00:09 GMT", "Thu, 01 Jan 2026 11:00:00 GMT", "soon", "-3", None]
    assert [retry_after_s(value, now) for value in values] == [9.0, 0.0, None, None, None]


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (httpx.Response(400, text="too long"), "http_400", "too long"),
        (httpx.ReadTimeout("slow"), "timeout", "ReadTimeout"),
        (httpx.ReadError("reset"), "broken_stream", "reset"),
        ([(0.0, token(1))], "broken_stream", "without [DONE]"),
        ([(0.0, DONE)], "broken_stream", "no output"),
        ([(0.0, token(1)), (0.0, httpx.RemoteProtocolError("cut"))], "broken_stream", "cut"),
        ([(0.0, "data: {broken\n\n")], "broken_stream", "{broken"),
        ([(0.0, "data: 5\n\n")], "broken_stream", "not an object"),
        ([(0.0, 'data: {"error": {"message": "died"}}\n\n')], "stream_error", "died"),
        ([(0.0, token(1)), (601.0, token(2))], "timeout", "600"),
    ],
)
@pytest.mark.asyncio
async def test_failures_have_a_kind_and_are_not_sent_again(
    complete: Callable[..., Any], answer: Answer, kind: str, detail: str
) -> None:
    result, seen = await complete(answer)
    assert (result.error, result.retries, len(seen)) == (kind, 0, 1)
    assert detail in result.detail


@pytest.mark.asyncio
async def test_a_refused_connection_is_tried_a_few_times(complete: Callable[..., Any]) -> None:
    refused = httpx.ConnectError("refused")
    result, _ = await complete(refused, GOOD)
    assert (result.error, result.retries) == (None, 1)
    result, seen = await complete(refused, refused, refused, refused)
    assert (result.error, len(seen)) == ("connect", 4)


@pytest.mark.asyncio
async def test_ids_are_sent_greedy_without_end_and_with_the_session(
    complete: Callable[..., Any],
) -> None:
    _, seen = await complete(GOOD)
    assert seen[0].headers["x-hisparsed-session"] == "s1"
    assert json.loads(seen[0].content) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


@pytest.mark.asyncio
async def test_text_sends_only_what_every_endpoint_knows(complete: Callable[..., Any]) -> None:
    _, seen = await complete(GOOD, prompt_format="text")
    assert not {"ignore_eos", "return_token_ids"} & json.loads(seen[0].content).keys()


@pytest.mark.asyncio
async def test_digests_follow_tokens_before_text(complete: Callable[..., Any]) -> None:
    def text_only(text: str) -> list[tuple[float, str | Exception]]:
        return [(0.0, f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"), (0.0, DONE)]

    answers = [GOOD, [(0.0, token(8)), (0.0, DONE)], GOOD, text_only("a"), text_only("b")]
    results = [(await complete(answer))[0] for answer in answers]
    assert [result.digest_of for result in results] == ["tokens"] * 3 + ["text"] * 2
    assert results[0].digest == results[2].digest
    assert len({result.digest for result in results}) == 4
