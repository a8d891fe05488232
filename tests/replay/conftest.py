"""A clock that jumps and an OpenAI endpoint in the same process, for tests that never wait."""

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.replay.client import RequestSettings
from hisparsed.replay.plan import ReplayPlan
from hisparsed.replay.scaled_trace import PromptMaker, Scale, ScaledCall, ScaledSession, TokenRange
from hisparsed.replay.trace import BlockRun

_SETTLE_ROUNDS = 100


class FakeClock:
    """Jumps to the next sleeper when nothing else has anything to do."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._driver: asyncio.Task[None] | None = None

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), wake))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        await wake

    async def _drive(self) -> None:
        while self._sleepers:
            for _ in range(_SETTLE_ROUNDS):
                await asyncio.sleep(0)
            at, _, wake = heapq.heappop(self._sleepers)
            if not wake.cancelled():
                self._now = max(self._now, at)
                wake.set_result(None)


@dataclass
class FakeEndpoint:
    """An OpenAI completions endpoint whose greedy output is a function of the prompt.

    `answers` are (status, headers) given before real ones; `wrong` changes the output of calls
    whose number of arrival is in it.
    """

    clock: FakeClock
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    wrong: set[int] = field(default_factory=set)
    seconds_per_token: float = 0.0
    seen: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    preemptions: int = 0
    on_request: Callable[[int], None] | None = None

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.completions, methods=["POST"]),
            ]
        )

    @property
    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self.app)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "small", "max_model_len": 5000}]})

    async def metrics(self, _: Request) -> Response:
        self.preemptions += 3
        return PlainTextResponse(
            "# TYPE vllm:num_preemptions_total counter\n"
            f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}.0\n'
        )

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.seen)
        self.seen.append((self.clock.now(), request.headers["x-hisparsed-session"], body))
        if self.on_request:
            self.on_request(number)
        if self.answers:
            status, headers = self.answers.pop(0)
            return JSONResponse({"error": "refused"}, status, headers)
        return StreamingResponse(self._stream(body, number), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], number: int) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        first = sum(ord(t) if isinstance(t, str) else t for t in body["prompt"])
        for step in range(body["max_tokens"]):
            if self.seconds_per_token:
                await self.clock.sleep(self.seconds_per_token)
            token = (first * 31 + step * 7 + (number in self.wrong)) % 256
            choice: dict[str, Any] = {"index": 0, "text": f"<{token}>"}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2},
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        self.running -= 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def endpoint(clock: FakeClock) -> FakeEndpoint:
    return FakeEndpoint(clock)


@pytest.fixture
def make_plan() -> Callable[..., ReplayPlan]:
    """Plans of `sessions` x `calls` calls, 64 tokens in a block, one more block with each call."""

    def make(
        sessions: int = 2, calls: int = 3, think_time_s: float = 0.0, **more: Any
    ) -> ReplayPlan:
        scale = Scale(Fraction(1, 16), 64)
        request = more.pop("request", RequestSettings("small"))
        return ReplayPlan(
            url="http://fake",
            request=request,
            prompts=PromptMaker(scale, 0, TokenRange()),
            sessions=tuple(
                ScaledSession(
                    f"s{number}",
                    tuple(
                        ScaledCall(
                            index=index,
                            blocks=(BlockRun(number * 1000, index + 1),),
                            tail_block=10**6 + number * 1000 + index,
                            input_tokens=4 * (index + 1) + 2,
                            output_tokens=5,
                            think_time_s=think_time_s * index,
                        )
                        for index in range(calls)
                    ),
                    0.0,
                )
                for number in range(sessions)
            ),
            **more,
        )

    return make
