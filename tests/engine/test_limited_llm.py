"""The engine's front: the operator's limit on the length of a call, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from hisparsed.engine.context_limit import CallLength, CallTooLongError, ContextLimit
from hisparsed.engine.limited_llm import LimitedLLM, transfer_fault


def limit_of(tokens: int | None, over: Any = "refuse") -> ContextLimit:
    limit = ContextLimit()
    limit.max_tokens = tokens
    limit.over = over
    return limit


def test_without_a_limit_nothing_is_changed() -> None:
    assert limit_of(None).answer_tokens(CallLength(10**6, None)) is None


def test_a_call_that_fits_keeps_what_it_asked_for() -> None:
    assert limit_of(100).answer_tokens(CallLength(60, 40)) is None


def test_an_answer_without_a_limit_gets_what_is_left() -> None:
    assert limit_of(100).answer_tokens(CallLength(60, None)) == 40


def test_an_answer_that_does_not_fit_is_cut_to_what_is_left() -> None:
    limit = limit_of(100)
    assert limit.answer_tokens(CallLength(60, 5_000)) == 40
    assert limit.answer_tokens(CallLength(99, 2)) == 1
    assert limit.refused == 0


@pytest.mark.parametrize("length", [CallLength(100, None), CallLength(101, 1)])
def test_a_prompt_that_leaves_no_room_is_refused_in_vllms_words(length: CallLength) -> None:
    limit = limit_of(100)
    limit.model_tokens = 900
    words = (
        "This model's maximum context length is 100 tokens. However, your prompt contains "
        f"{length.prompt} input tokens"
    )
    with pytest.raises(CallTooLongError, match=words):
        limit.answer_tokens(length)
    assert limit.refused == 1


def test_what_cannot_fit_the_model_is_refused_unseen_and_counts_as_nobodys_decision() -> None:
    limit = limit_of(None)
    assert limit.refuses(10**9) is None
    limit.model_tokens = 900
    assert limit.refuses(899) is None
    assert "maximum context length is 900 tokens" in (limit.refuses(900) or "")
    assert limit.refused == 0
    limit.max_tokens = 100
    assert limit.refuses(99) is None
    assert "maximum context length is 100 tokens" in (limit.refuses(100) or "")
    assert limit.refused == 1
    limit.over = "wait"
    assert limit.refuses(100) is None
    assert limit.in_force == 900


def test_where_it_may_wait_it_keeps_its_length() -> None:
    limit = limit_of(100, "wait")
    assert limit.answer_tokens(CallLength(200, None)) is None
    assert limit.must_take_turns(CallLength(200, None))
    assert not limit.must_take_turns(CallLength(99, 1))


async def test_long_calls_run_one_at_a_time_and_a_cancelled_one_frees_its_turn() -> None:
    limit = limit_of(100, "wait")
    running: set[str] = set()
    begun: list[str] = []
    go_on = asyncio.Event()

    async def outputs(name: str) -> AsyncGenerator[str, None]:
        running.add(name)
        begun.append(name)
        assert len(running) == 1
        try:
            await go_on.wait()
            yield name
        finally:
            running.discard(name)

    async def call(name: str) -> list[str]:
        return [output async for output in limit.in_turn(outputs(name))]

    calls = [asyncio.create_task(call(name)) for name in "abc"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert limit.waiting == 2
    assert limit.held_total == 2
    assert begun == ["a"]
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    go_on.set()
    assert await asyncio.gather(calls[1], calls[2]) == [["b"], ["c"]]
    assert (begun, limit.waiting) == (["a", "b", "c"], 0)


async def test_the_next_long_call_begins_when_the_last_one_is_aborted_not_before() -> None:
    limit = ContextLimit()
    happened: list[str] = []

    async def outputs(name: str) -> AsyncGenerator[str, None]:
        happened.append(f"{name} begins")
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            # As vLLM's, which makes the engine release the call's blocks.
            await asyncio.sleep(0)
            happened.append(f"{name} is aborted")

    async def begin(call: AsyncGenerator[str, None]) -> str:
        return await anext(call)

    first, second = limit.in_turn(outputs("a")), limit.in_turn(outputs("b"))
    await begin(first)
    waiting = asyncio.create_task(begin(second))
    await asyncio.sleep(0)
    await first.aclose()
    assert await waiting == "b"
    assert happened == ["a begins", "a is aborted", "b begins"]
    await second.aclose()


@pytest.mark.parametrize("given", ["x", "", 5, 0, 0.5, True, [], [1, "a"]])
def test_what_is_no_object_is_named_with_what_would_be_right(given: Any) -> None:
    fault = transfer_fault({"kv_transfer_params": given})
    assert fault is not None
    assert fault.startswith(f"vllm_xargs.kv_transfer_params: {given!r} is not an object; ")
    assert "send an object in kv_transfer_params" in fault


def test_a_long_value_is_shown_by_its_beginning() -> None:
    fault = transfer_fault({"kv_transfer_params": "x" * 5_000})
    assert fault is not None
    assert len(fault) < 300


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"do_remote_decode": "yes", "remote_block_ids": [[None], "z"]}},
        {"session_id": "x", "ec_transfer_params": "x"},
    ],
)
def test_objects_pass_whatever_stands_in_them(extra_args: dict[str, Any] | None) -> None:
    assert transfer_fault(extra_args) is None


def test_the_front_refuses_the_call_before_the_engine_sees_it() -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": "x"})
    front = LimitedLLM.__new__(LimitedLLM)  # no engine: nothing of it is touched
    with pytest.raises(VLLMValidationError, match="'x' is not an object") as refused:
        front.generate({"prompt_token_ids": [1]}, params, "a-call")
    assert refused.value.parameter == "vllm_xargs.kv_transfer_params"
