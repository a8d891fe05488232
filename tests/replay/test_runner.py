"""Whole replays against an endpoint in the same process, on a clock that jumps."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from hisparsed.errors import UserError
from hisparsed.replay.client import RequestSettings
from hisparsed.replay.plan import ReplayPlan
from hisparsed.replay.results import compare, summarise
from hisparsed.replay.runner import ReplayProgress, replay

MakePlan = Callable[..., ReplayPlan]


@pytest.mark.asyncio
async def test_every_call_is_sent_in_order_with_its_prompt(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    plan = make_plan(sessions=5, calls=3, concurrency=2)
    result = await replay(plan, transport=endpoint.transport, clock=clock)
    assert result.stopped_by == "end_of_trace"
    assert sorted(call.key for call in result.calls) == [
        (f"s{session}", index) for session in range(5) for index in range(3)
    ]
    for session in plan.sessions:
        sent = [body["prompt"] for _, owner, body in endpoint.seen if owner == session.id]
        assert sent == [plan.prompts.token_ids(call) for call in session.calls]
        assert sent[1][:4] == sent[0][:4]


@pytest.mark.asyncio
async def test_pauses_follow_our_own_response(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    endpoint.seconds_per_token = 2.0
    plan = make_plan(sessions=1, calls=3, think_time_s=30.0, time_scale=0.5)
    result = await replay(plan, transport=endpoint.transport, clock=clock)
    starts = [at - 1000.0 for at, _, _ in endpoint.seen]
    # Five tokens of 2 s each, then half of the recorded 30 s and 60 s.
    assert starts == [0.0, 10.0 + 15.0, 25.0 + 10.0 + 30.0]
    assert [call.started_s for call in result.calls] == starts
    assert result.seconds == 75.0


@pytest.mark.asyncio
async def test_no_more_sessions_run_than_asked(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    endpoint.seconds_per_token = 1.0
    plan = make_plan(sessions=7, calls=2, concurrency=3)
    result = await replay(plan, transport=endpoint.transport, clock=clock)
    assert endpoint.most_running == 3
    assert len(result.calls) == 14


@pytest.mark.asyncio
async def test_arrivals_start_sessions_at_their_time(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    plan = make_plan(sessions=4, calls=1, concurrency=1, arrivals_s=(0.0, 4.0, 4.5))
    endpoint.seconds_per_token = 2.0
    result = await replay(plan, transport=endpoint.transport, clock=clock)
    started = {call.session_id: call.started_s for call in result.calls}
    assert started == {"s0": 0.0, "s1": 4.0, "s2": 4.5}


@pytest.mark.asyncio
async def test_time_up_cuts_calls_in_flight(endpoint: Any, clock: Any, make_plan: MakePlan) -> None:
    endpoint.seconds_per_token = 1.0
    plan = make_plan(sessions=2, calls=9, concurrency=2, duration_s=12.0)
    result = await replay(plan, transport=endpoint.transport, clock=clock)
    assert (result.stopped_by, result.seconds) == ("time_up", 12.0)
    assert (len(result.calls), result.unfinished) == (4, 2)


@pytest.mark.asyncio
async def test_stop_gives_a_partial_result(endpoint: Any, clock: Any, make_plan: MakePlan) -> None:
    stop = asyncio.Event()
    endpoint.seconds_per_token = 1.0

    def third_call(progress: ReplayProgress) -> None:
        if progress.done == 3:
            stop.set()

    plan = make_plan(sessions=1, calls=9)
    result = await replay(
        plan, transport=endpoint.transport, clock=clock, stop=stop, on_progress=third_call
    )
    assert (result.stopped_by, len(result.calls), result.unfinished) == ("interrupted", 3, 1)


@pytest.mark.asyncio
async def test_an_error_in_the_caller_ends_the_replay(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    def broken(_: ReplayProgress) -> None:
        raise RuntimeError("display")

    with pytest.raises(ExceptionGroup) as error:
        await replay(make_plan(), transport=endpoint.transport, clock=clock, on_progress=broken)
    assert error.group_contains(RuntimeError, match="display")


@pytest.mark.asyncio
async def test_a_failed_call_does_not_end_its_session(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    endpoint.answers = [(500, {}), (429, {"retry-after": "3"})]
    seen: list[ReplayProgress] = []
    plan = make_plan(sessions=1, calls=3)
    result = await replay(plan, transport=endpoint.transport, clock=clock, on_progress=seen.append)
    summary = summarise(result)
    assert [call.error for call in result.calls] == ["http_500", None, None]
    assert (summary.requests, summary.failed, summary.errors) == (2, 1, {"http_500": 1})
    assert (summary.retries, summary.retry_wait_s) == (1, 3.0)
    assert [(p.done, p.failed, p.total) for p in seen] == [(1, 1, 3), (2, 1, 3), (3, 1, 3)]


@pytest.mark.asyncio
async def test_a_lost_endpoint_ends_the_replay(clock: Any, make_plan: MakePlan) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    plan = make_plan(sessions=20, calls=5, concurrency=1)
    result = await replay(plan, transport=httpx.MockTransport(refuse), clock=clock)
    assert (result.stopped_by, result.preemptions) == ("endpoint_lost", None)
    assert 1 <= len(result.calls) < 20


@pytest.mark.asyncio
async def test_two_replays_are_equal_but_for_a_seeded_difference(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    plan = make_plan(sessions=3, calls=4, concurrency=1)
    first = await replay(plan, transport=endpoint.transport, clock=clock)
    second = await replay(plan, transport=endpoint.transport, clock=clock)
    same = compare(first.calls, second.calls)
    assert (same.compared, same.differing, same.only_in_a) == (12, (), 0)
    endpoint.wrong = {24 + 6}
    third = await replay(plan, transport=endpoint.transport, clock=clock)
    assert compare(first.calls, third.calls).differing == (("s1", 2),)


@pytest.mark.asyncio
async def test_comparing_leaves_out_failed_and_unlike_calls(
    endpoint: Any, clock: Any, make_plan: MakePlan
) -> None:
    ids = await replay(make_plan(calls=2), transport=endpoint.transport, clock=clock)
    text_plan = make_plan(calls=2, request=RequestSettings("small", prompt_format="text"))
    endpoint.answers = [(400, {})]
    text = await replay(text_plan, transport=endpoint.transport, clock=clock)
    result = compare(ids.calls, text.calls)
    assert (result.compared, len(result.not_comparable)) == (0, 3)
    assert (result.only_in_a, result.only_in_b) == (1, 0)


@pytest.mark.asyncio
async def test_the_summary_adds_up(endpoint: Any, clock: Any, make_plan: MakePlan) -> None:
    endpoint.seconds_per_token = 0.1
    plan = make_plan(sessions=2, calls=3, concurrency=1, clipped=4, dropped=1)
    summary = summarise(await replay(plan, transport=endpoint.transport, clock=clock))
    tokens_in = 2 * (6 + 10 + 14)
    assert (summary.requests, summary.tokens_in, summary.tokens_out) == (6, tokens_in, 30)
    assert (summary.prefix_hit_tokens, summary.preemptions) == (tokens_in // 2, 3)
    assert summary.seconds == pytest.approx(3.0)
    assert summary.requests_per_hour == pytest.approx(7200)
    assert (summary.clipped, summary.dropped, summary.unfinished) == (4, 1, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sessions": 0}, "no call is left"),
        ({"concurrency": 0}, "--concurrency: 0"),
        ({"time_scale": float("nan")}, "--time-scale: nan"),
        ({"arrivals_s": ()}, "--arrivals"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(
    make_plan: MakePlan, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(**wrong)
