"""Runs a plan: each session sends its next call after the pause that follows its own response.

Clock and transport are passed in. The next recorded prompt is sent as recorded, even after a failed
call: it does not depend on our response. Does not measure single calls, compute percentiles or
print.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from hisparsed.replay.client import (
    Clock,
    CompletionClient,
    OutgoingCall,
    SystemClock,
    http_client,
    read_preemptions,
)
from hisparsed.replay.plan import ReplayPlan
from hisparsed.replay.results import CallResult, ReplayResult, StopReason
from hisparsed.replay.scaled_trace import ScaledCall, ScaledSession


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Where a replay stands after a call ended."""

    done: int
    failed: int
    total: int
    retries: int
    tokens_in: int
    tokens_out: int
    seconds: float
    last: CallResult


async def replay(
    plan: ReplayPlan,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[ReplayProgress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> ReplayResult:
    """Replay `plan` and return every call's result.

    Setting `stop` ends it early: calls in flight are cancelled and counted as unfinished. So does
    the plan's duration, and an endpoint that no longer takes connections.
    """
    clock = clock or SystemClock()
    async with http_client(plan.url, plan.request.timeout_s, plan.api_key, transport) as http:
        before = await read_preemptions(http)
        run = _Run(plan, http, clock, on_progress)
        stopped_by = await run.until_stopped(stop or asyncio.Event())
        seconds = run.seconds()
        after = await read_preemptions(http)
    return ReplayResult(
        calls=tuple(run.results),
        seconds=seconds,
        stopped_by=stopped_by,
        unfinished=run.in_flight,
        clipped=plan.clipped,
        dropped=plan.dropped,
        preemptions=None if before is None or after is None else after - before,
    )


class _Run:
    def __init__(
        self,
        plan: ReplayPlan,
        http: httpx.AsyncClient,
        clock: Clock,
        on_progress: Callable[[ReplayProgress], None] | None,
    ) -> None:
        self.results: list[CallResult] = []
        self.in_flight = 0
        self._plan = plan
        self._clock = clock
        self._on_progress = on_progress
        self._start = clock.now()
        self._client = CompletionClient(http, clock, plan.request, self._start)
        self._lost = asyncio.Event()
        self._failed = self._retries = self._tokens_in = self._tokens_out = 0

    def seconds(self) -> float:
        return self._clock.now() - self._start

    async def until_stopped(self, stop: asyncio.Event) -> StopReason:
        """Run to the end of the plan or the first reason to stop, then cancel what is left."""
        endings: dict[StopReason, Coroutine[Any, Any, Any]] = {
            "end_of_trace": self._all_sessions(),
            "interrupted": stop.wait(),
            "endpoint_lost": self._lost.wait(),
        }
        if self._plan.duration_s is not None:
            endings["time_up"] = self._clock.sleep(self._plan.duration_s)
        tasks = {asyncio.create_task(ending): reason for reason, ending in endings.items()}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        reasons = {tasks[task] for task in done}
        # The last call may end in the same moment that the endpoint is lost or the time is up.
        return next(reason for reason in _BY_WEIGHT if reason in reasons)

    async def _all_sessions(self) -> None:
        waiting = iter(self._plan.planned_sessions)
        async with asyncio.TaskGroup() as group:
            if self._plan.arrivals_s is None:
                for _ in range(self._plan.concurrency):
                    group.create_task(self._worker(waiting))
            else:
                for arrival_s, session in zip(self._plan.arrivals_s, waiting, strict=False):
                    group.create_task(self._arrival(arrival_s, session))

    async def _worker(self, waiting: Iterator[ScaledSession]) -> None:
        for session in waiting:
            await self._session(session)

    async def _arrival(self, arrival_s: float, session: ScaledSession) -> None:
        await self._clock.sleep(arrival_s)
        await self._session(session)

    async def _session(self, session: ScaledSession) -> None:
        for position, call in enumerate(session.calls):
            pause_s = call.think_time_s * self._plan.time_scale
            if position and pause_s > 0:
                await self._clock.sleep(pause_s)
            self._take(await self._send(session.id, call))

    async def _send(self, session_id: str, call: ScaledCall) -> CallResult:
        prompts, as_text = self._plan.prompts, self._plan.request.prompt_format == "text"
        outgoing = OutgoingCall(
            session_id=session_id,
            call_index=call.index,
            prompt=prompts.text(call) if as_text else prompts.token_ids(call),
            prompt_tokens=call.input_tokens,
            max_tokens=call.output_tokens,
        )
        self.in_flight += 1
        result = await self._client.complete(outgoing)
        self.in_flight -= 1
        return result

    def _take(self, result: CallResult) -> None:
        self.results.append(result)
        self._retries += result.retries
        if result.error is None:
            self._tokens_in += result.prompt_tokens
            self._tokens_out += result.completion_tokens
        else:
            self._failed += 1
        if result.error == "connect":
            self._lost.set()
        if self._on_progress:
            self._on_progress(
                ReplayProgress(
                    done=len(self.results),
                    failed=self._failed,
                    total=self._plan.calls,
                    retries=self._retries,
                    tokens_in=self._tokens_in,
                    tokens_out=self._tokens_out,
                    seconds=self.seconds(),
                    last=result,
                )
            )


_BY_WEIGHT: tuple[StopReason, ...] = ("endpoint_lost", "interrupted", "end_of_trace", "time_up")
