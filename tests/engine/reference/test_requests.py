"""Requests of the reference node: what is refused of a call, and who holds a state row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from hisparsed.engine.compat.residency import ResidencyReader
from hisparsed.engine.reference.executor import ReferenceExecutor
from hisparsed.engine.reference.request_check import unsupported
from hisparsed.engine.reference.requests import RequestTables


@pytest.mark.parametrize(
    "asked",
    [{"logprob_token_ids": [65]}, {"prompt_logprob_start": 2}, {"thinking_token_budget": 5}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_honoured_is_named(asked: dict[str, Any]) -> None:
    assert unsupported(SamplingParams(**asked)) == next(iter(asked))


def test_what_the_sampler_does_is_let_through() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        seed=3,
        min_tokens=2,
        stop=["x"],
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=2,
        prompt_logprobs=0,
        logit_bias={65: 1.0},
        bad_words=["no"],
    )
    assert unsupported(params) is None


class QuietConnectors:
    """Connectors with nothing to transfer."""

    def before_forward(self, metadata: Any, decoding: Any) -> Any:
        return SimpleNamespace(residency_updates={})

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        return KVConnectorOutput()


def one_row_executor() -> ReferenceExecutor:
    """An executor with room for one request, whose steps compute nothing."""
    executor: Any = ReferenceExecutor.__new__(ReferenceExecutor)
    executor._tables = RequestTables(rows=1, pages=4, groups=1, hot_blocks=1)
    executor._hot = SimpleNamespace(reset=lambda request: None)
    executor._connectors = QuietConnectors()
    executor._residency = ResidencyReader(first=2, groups=1)
    made: ReferenceExecutor = executor
    return made


def step(executor: ReferenceExecutor, new: str | None = None, **left: set[str]) -> None:
    """One step that takes ``new`` in; ``left`` are the fields for requests that went."""
    output = SchedulerOutput.make_empty()
    for field, request_ids in left.items():
        setattr(output, field, request_ids)
    if new is not None:
        output.scheduled_new_reqs = [
            SimpleNamespace(
                req_id=new,
                prefill_token_ids=None,
                prompt_token_ids=[1, 2, 3],
                sampling_params=None,
                block_ids=([1], [2], [3], []),
                num_computed_tokens=0,
            )
        ]
    executor.execute_model(output)


@pytest.mark.parametrize("left", ["finished_req_ids", "preempted_req_ids"])
def test_a_request_that_left_frees_its_row_for_another(left: str) -> None:
    executor = one_row_executor()
    step(executor, new="first")
    step(executor, new="second", **{left: {"first"}})
    assert list(executor._tables.requests) == ["second"]


def test_a_preempted_request_comes_back_after_another() -> None:
    executor = one_row_executor()
    step(executor, new="first")
    step(executor, new="second", preempted_req_ids={"first"})
    step(executor, new="first", finished_req_ids={"second"})
    assert executor._tables.requests["first"].tokens == [1, 2, 3]


def test_more_requests_than_rows_are_a_mistake() -> None:
    executor = one_row_executor()
    step(executor, new="first")
    with pytest.raises(RuntimeError, match="no state row for request second"):
        step(executor, new="second")
