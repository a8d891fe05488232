"""Rows of a step through vLLM's sampler: drafts, random numbers, masks and log probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE
from hisparsed.engine.reference.requests import RequestState
from hisparsed.engine.reference.sampling import SampledRequest, StepSampler, natural_logits

PROMPT = list(b"prompt")


def wanted(
    output: str = "", drafts: tuple[int, ...] = (), name: str = "one", **sampling: Any
) -> SampledRequest:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    params.update_from_generation_config({}, eos_token_id=EOS_TOKEN_ID)
    tokens = [*PROMPT, *output.encode()]
    state = RequestState(
        row=0, tokens=tokens, params=params, prompt_len=len(PROMPT), known=len(PROMPT)
    )
    return SampledRequest(name, state, drafts)


def rows(*best: str, runner_up: str = "z") -> torch.Tensor:
    """Logits that choose each of ``best``, and after it ``runner_up``."""
    logits = torch.zeros(len(best), VOCAB_SIZE)
    for row, letter in zip(logits, best, strict=True):
        row[ord(runner_up)] = 1.0
        row[ord(letter)] = 2.0
    return logits


def sample(logits: torch.Tensor, *requests: SampledRequest) -> list[str]:
    tokens, _ = StepSampler().sample(logits, requests, {})
    return [bytes(tokens[one.request_id]).decode("latin-1") for one in requests]


@pytest.mark.parametrize(
    ("drafts", "emitted"),
    [("abc", "abcd"), ("aXc", "ab"), ("Xbc", "a"), ("a", "ab"), ("", "a")],
    ids=["all right", "second wrong", "first wrong", "one draft", "none"],
)
def test_tokens_up_to_the_first_wrong_draft_and_its_correction(drafts: str, emitted: str) -> None:
    logits = rows(*"abcd"[: 1 + len(drafts)])
    assert sample(logits, wanted(drafts=tuple(drafts.encode()))) == [emitted]


def test_a_greedy_tie_goes_to_the_lowest_token() -> None:
    assert sample(natural_logits(torch.zeros(1, VOCAB_SIZE)), wanted()) == ["\n"]


def test_bytes_that_cannot_be_printed_come_only_where_nothing_else_may() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 200] = 4_000_000.0
    natural = natural_logits(logits)
    free, held = wanted(name="free"), wanted(name="held", allowed_token_ids=[200])
    tokens, _ = StepSampler().sample(natural.repeat(2, 1), (free, held), {})
    assert tokens["held"] == [200]
    assert tokens["free"] != [200]


@pytest.mark.parametrize(
    ("asked", "token"),
    [
        ({"presence_penalty": 1.5}, "z"),
        ({"frequency_penalty": 1.5}, "z"),
        ({"repetition_penalty": 3.0}, "z"),
        ({"logit_bias": {ord("z"): 5.0}}, "z"),
        ({"allowed_token_ids": [ord("z"), ord("y")]}, "z"),
        ({"min_p": 0.9, "temperature": 1.0, "seed": 1}, "a"),
        ({"top_k": 1, "temperature": 1.0, "seed": 1}, "a"),
        ({"top_p": 0.001, "temperature": 1.0, "seed": 1}, "a"),
        ({}, "a"),
    ],
    ids=lambda asked: next(iter(asked), "nothing") if isinstance(asked, dict) else asked,
)
def test_what_a_call_asks_for_changes_its_own_row_alone(asked: dict[str, Any], token: str) -> None:
    other = wanted(name="other", output="a")
    logits = rows("a", "a")
    assert sample(logits, wanted(output="a", **asked), other) == [token, "a"]


def test_a_penalty_sees_the_drafts_before_its_row() -> None:
    call = wanted(drafts=(ord("a"),), presence_penalty=1.5)
    assert sample(rows("a", "a"), call) == ["az"]


def test_the_end_waits_for_the_least_number_of_tokens() -> None:
    logits = rows("a", "a")
    logits[:, EOS_TOKEN_ID] = 9.0
    tokens, _ = StepSampler().sample(
        logits,
        (wanted(name="short", min_tokens=2), wanted(name="long", output="xy", min_tokens=2)),
        {},
    )
    assert tokens == {"short": [ord("a")], "long": [EOS_TOKEN_ID]}


def test_random_tokens_are_of_seed_and_position_whatever_runs_beside() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    call = wanted(output="abc", temperature=1.0, seed=5)
    (alone,) = sample(logits, call)
    others = [wanted(name=f"other-{n}", temperature=1.0, seed=n) for n in range(7)]
    together = sample(logits.repeat(8, 1), *others, call)
    assert together[-1] == alone
    drafted = wanted(output="ab", drafts=(ord("c"),), temperature=1.0, seed=5)
    forced = logits.repeat(2, 1)
    forced[0, ord("c")] = 1_000.0
    assert sample(forced, drafted) == [f"c{alone}"]
    assert len(set(together)) > 1


def test_log_probabilities_are_those_before_penalties_and_sum_to_one() -> None:
    call = wanted(output="a", logprobs=-1, presence_penalty=1.5)
    _, found = StepSampler().sample(rows("a"), (call,), {})
    (values,) = found["one"].logprobs
    assert sum(math.exp(value) for value in values[1:]) == pytest.approx(1.0, abs=1e-5)
    assert found["one"].logprob_token_ids[0, :2].tolist() == [ord("z"), ord("a")]
    assert found["one"].sampled_token_ranks.tolist() == [2]


def test_each_accepted_token_has_log_probabilities_and_no_other() -> None:
    drafted = wanted(name="drafted", drafts=(ord("a"), ord("X"), ord("c")), logprobs=1)
    silent = wanted(name="silent")
    _, found = StepSampler().sample(rows(*"abcde"), (drafted, silent), {})
    assert list(found) == ["drafted"]
    assert found["drafted"].logprob_token_ids[:, 0].tolist() == list(b"ab")


def test_log_probabilities_of_a_prompt_are_of_the_tokens_that_follow() -> None:
    found = StepSampler().prompt_logprobs(rows("a", "b"), list(b"az"), 1)
    assert found.logprob_token_ids.tolist() == [[ord("a"), ord("a")], [ord("z"), ord("b")]]
    assert found.selected_token_ranks.tolist() == [1, 2]
