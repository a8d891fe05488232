"""Grammars: vLLM's masks as rows of a step, and answers that end."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conversations import EngineShape, answer_of, ask, build_engine, core_of, finish, text
from vllm.sampling_params import StructuredOutputsParams

from hisparsed.engine.reference.grammar import allowed_by_request, allowed_tokens, closing_bias
from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE

WORDS = -(-VOCAB_SIZE // 32)


def mask(*tokens: int) -> torch.Tensor:
    allowed = torch.zeros(1, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, list(tokens)] = True
    return allowed


def preferred(*tokens: int, begins: bool = False) -> str:
    """Of ``tokens``, those that come first; at the beginning of an answer or later."""
    bias = closing_bias(mask(*tokens), torch.tensor([begins]))[0]
    best = max(float(bias[token]) for token in tokens)
    return "".join(
        "<end>" if token == EOS_TOKEN_ID else chr(token) for token in tokens if bias[token] == best
    )


def test_bits_of_the_mask_are_tokens() -> None:
    bits = np.zeros((2, WORDS), dtype=np.int32)
    bits[0, 1] = 1 << 3
    bits[1, 0] = -1
    found = allowed_tokens(bits)
    assert found[0].nonzero().flatten().tolist() == [35]
    assert found[1].nonzero().flatten().tolist() == list(range(32))


def test_each_request_has_a_mask_a_draft_and_one_more() -> None:
    bits = np.arange(4, dtype=np.int32).reshape(4, 1).repeat(WORDS, axis=1)
    grammar: Any = SimpleNamespace(
        structured_output_request_ids=["drafted", "plain"], grammar_bitmask=bits
    )
    found = allowed_by_request(grammar, {"drafted": [7, -1], "other": [1]})
    assert found["drafted"].shape == (3, VOCAB_SIZE)
    assert torch.equal(found["plain"], allowed_tokens(bits[3:]))
    assert allowed_by_request(None, {}) == {}


@pytest.mark.parametrize(
    ("allowed", "first"),
    [
        (b'}",', "}"),
        (b"],\n", "]"),
        (b'"\n ', '"'),
        (b",0123456789", ","),
        (b":\t ", ":"),
        (b'{["-0123456789tfn ', "{"),
        (b"{n ", "n"),
    ],
    ids=["object", "list", "key", "number", "colon", "any value", "null before an object"],
)
def test_what_closes_comes_first(allowed: bytes, first: str) -> None:
    assert preferred(*allowed) == first


def test_inside_a_string_only_its_quote_closes() -> None:
    printable = range(32, 127)
    assert preferred(*printable) == '"'
    without_quote = [token for token in printable if token != ord('"')]
    assert preferred(*without_quote) == bytes(without_quote).decode()


def test_the_end_comes_before_all() -> None:
    assert preferred(*range(32, 127), EOS_TOKEN_ID) == "<end>"


def test_no_answer_is_empty_that_may_be_another() -> None:
    letters = string.ascii_letters
    assert preferred(*range(32, 127), EOS_TOKEN_ID, begins=True) == letters[26:] + letters[:26]
    assert preferred(*b"12", EOS_TOKEN_ID, begins=True) == "12"
    assert preferred(EOS_TOKEN_ID, begins=True) == "<end>"


def test_nothing_is_preferred_where_everything_is_allowed() -> None:
    everything = torch.ones(2, VOCAB_SIZE, dtype=torch.bool)
    assert not closing_bias(everything, torch.tensor([True, False])).any()


NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "kind": {"enum": ["\u00e9", "b"]},
        "tree": {"$ref": "#/$defs/tree"},
        "share": {"type": "number"},
    },
    "required": ["name", "count", "tags", "kind", "tree", "share"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
MAYBE_A_TOOL = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<tool_call>",
                    "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                    "end": "</tool_call>",
                }
            ],
        },
    }
)
"""Of a call with a strict tool and ``tool_choice: auto``."""
CALLS: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": {"json": NESTED}},
    "sampled": {"structured_outputs": {"json": NESTED}, "temperature": 1.0, "seed": 4},
    "any object": {"structured_outputs": {"json_object": True}},
    "maybe a tool": {"structured_outputs": {"structural_tag": MAYBE_A_TOOL}},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "\u00e9"]}},
    "regex": {"structured_outputs": {"regex": "[0-9]+-[a-z]{4}"}},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "seeded": {"temperature": 0.8, "seed": 9, "top_p": 0.9, "top_k": 40},
    "plain": {"logprobs": 3, "prompt_logprobs": 2},
}


def answers(folder: Path, shape: EngineShape) -> dict[str, Any]:
    """Every call at once, on an engine of that shape."""
    engine = build_engine(folder, shape)
    for name, sampling in CALLS.items():
        given = dict(sampling)
        if structured := given.get("structured_outputs"):
            given |= {
                "structured_outputs": StructuredOutputsParams(**structured),
                "ignore_eos": False,
            }
        ask(engine, name, text(90, name), 150 if structured else 20, **given)
    done = finish(engine)
    core_of(engine).shutdown()
    return done


def told(logprobs: Sequence[Any]) -> list[Any]:
    """Token, value and rank at each position, to be compared."""
    return [
        None
        if one is None
        else [(token, value.logprob, value.rank) for token, value in one.items()]
        for one in logprobs
    ]


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> dict[str, Any]:
    return answers(folder, EngineShape())


@pytest.mark.engine
def test_every_answer_under_a_grammar_ends_and_is_what_was_asked_for(
    one_by_one: dict[str, Any],
) -> None:
    under = [name for name, one in CALLS.items() if "structured_outputs" in one]
    said = {name: one_by_one[name].outputs[0] for name in under}
    assert {name: one.finish_reason for name, one in said.items()} == dict.fromkeys(under, "stop")
    for name in ("schema", "sampled"):
        made = json.loads(said[name].text)
        assert list(made) == NESTED["required"]
        assert len(made["name"]) == 3
        assert made["tags"] == ["", ""]
        assert made["tree"] == {"next": None}
    assert json.loads(said["any object"].text) == {}
    assert said["maybe a tool"].text.isalpha()
    assert said["choice"].text in {"yes", "no", "\u00e9"}


@pytest.mark.engine
@pytest.mark.parametrize(
    "shape",
    [
        EngineShape(speculative_tokens=3),
        pytest.param(EngineShape(max_num_batched_tokens=32), marks=pytest.mark.long),
    ],
    ids=["drafts", "small chunks"],
)
def test_the_same_tokens_and_log_probabilities_however_steps_are_cut(
    folder: Path, one_by_one: dict[str, Any], shape: EngineShape
) -> None:
    found = answers(folder, shape)
    assert {name: answer_of(one) for name, one in found.items()} == {
        name: answer_of(one) for name, one in one_by_one.items()
    }
    before, after = one_by_one["plain"], found["plain"]
    assert told(after.outputs[0].logprobs) == told(before.outputs[0].logprobs)
    assert told(after.prompt_logprobs) == told(before.prompt_logprobs)
    assert len(after.prompt_logprobs) == 90
