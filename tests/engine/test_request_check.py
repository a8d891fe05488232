"""What the reference node refuses of a call, and what it lets through."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from hisparsed.engine.reference.request_check import NEUTRAL, unsupported_reason


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.2},
        {"min_p": 0.1},
        {"logprobs": 0},
        {"prompt_logprobs": 2},
        {"logit_bias": {65: 1.0}},
        {"allowed_token_ids": [65]},
        {"bad_words": ["no"]},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_honoured_is_named_with_its_value(asked: dict[str, Any]) -> None:
    ((name, value),) = asked.items()
    reason = unsupported_reason(SamplingParams(**asked))
    assert reason is not None
    assert reason.startswith(f"{name} (got {value!r}) is not supported")


def test_what_the_sampler_does_is_let_through() -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, seed=3, min_tokens=2, max_tokens=8, stop=["x"]
    )
    assert unsupported_reason(params) is None


def test_the_defaults_ask_for_nothing() -> None:
    params = SamplingParams()
    assert all(getattr(params, name) in (neutral, [], {}) for name, neutral in NEUTRAL.items())
