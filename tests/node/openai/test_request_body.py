"""What the body of a call says: answers, lone surrogates, digests and fewest tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.node.openai.request_body import (
    answers_asked,
    least_tokens,
    lone_surrogate,
    prompt_marks,
)


@pytest.mark.parametrize(
    ("call", "answers"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 7}, 7),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": ["a", "b", "c"], "n": 4}, 12),
        ({"prompt": [5, 6, 7, 8]}, 1),
        ({"prompt": [[5, 6], [7, 8]]}, 2),
        ({"messages": [{"role": "user", "content": "a"}] * 9, "n": 2}, 2),
        ({"messages": [[{"role": "user", "content": "a"}]] * 9, "n": 2}, 18),
        ({"token_ids": [5, 6], "sampling_params": {"n": 6}}, 6),
        ({"prompt": "a", "n": "16"}, 16),
        ({"prompt": "a", "n": 16.0}, 16),
    ],
)
def test_answers_are_prompts_times_n(call: dict[str, Any], answers: int) -> None:
    assert answers_asked(json.dumps(call).encode()) == answers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"n": null, "prompt": null}',
        b'{"n": -3}',
        b'{"n": [9]}',
        b'{"n": "many"}',
        b'{"n": NaN}',
        b'{"n": 1e999}',
        b'{"prompt": [], "messages": {}}',
        b'{"sampling_params": [1]}',
    ],
)
def test_what_is_no_number_is_left_to_vllm(body: bytes) -> None:
    assert answers_asked(body) == 1


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": "\ud800"},
        {"prompt": "a", "stop": ["b\ude00"]},
        {"kv_transfer_params": {"\ud83d": 1}},
        {"prompt": "\ud83d\ude00 and \ud83d"},
        {"prompt": "\ude00\ud83d"},
    ],
)
def test_half_a_character_is_told_with_its_place(call: dict[str, Any]) -> None:
    found = lone_surrogate(json.dumps(call).encode())
    assert found is not None
    assert "half of a character" in found
    assert " at line 1 column " in found
    assert "send both halves" in found


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": "an emoji: \U0001f600"}).encode(),
        json.dumps({"prompt": "an emoji: \U0001f600"}, ensure_ascii=False).encode(),
        json.dumps({"prompt": "the text \\ud800 spelt out"}).encode(),
        b'{"prompt": "\\ud800',
        b'{"prompt": "\\ud8zz"}',
        b"[" * 100_000 + b'"\\ud800"',
        b"",
    ],
    ids=["a pair", "bytes", "spelt out", "cut off", "no escape", "too deep", "empty"],
)
def test_what_is_whole_or_no_json_passes(body: bytes) -> None:
    assert lone_surrogate(body) is None


def marks(**call: Any) -> tuple[bytes, ...]:
    return prompt_marks(json.dumps({"model": "m", **call}).encode())


@given(st.text(max_size=2000), st.text(max_size=600))
def test_a_text_that_goes_on_keeps_its_chain(text: str, more: str) -> None:
    assert marks(prompt=text + more)[: len(marks(prompt=text))] == marks(prompt=text)


@given(st.lists(st.integers(0, 100), max_size=400), st.lists(st.integers(0, 100), max_size=100))
def test_token_ids_that_go_on_keep_their_chain(tokens: list[int], more: list[int]) -> None:
    chain = marks(prompt=tokens)
    assert len(chain) == len(tokens) // 64
    assert marks(prompt=tokens + more)[: len(chain)] == chain


def test_a_changed_beginning_changes_the_whole_chain() -> None:
    messages = [{"role": "user", "content": str(turn)} for turn in range(4)]
    chain = marks(messages=messages)
    changed = marks(messages=[{"role": "user", "content": "other"}, *messages[1:]])
    assert len(chain) == 4
    assert not set(chain) & set(changed)


@pytest.mark.parametrize("key", ["tools", "system", "instructions"])
def test_what_a_template_puts_first_belongs_to_the_chain(key: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert marks(messages=messages) != marks(messages=messages, **{key: ["something"]})


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    text = "words " * 200
    assert marks(prompt=[text]) == marks(prompt=text)
    assert marks(prompt=[list(range(128))]) == marks(prompt=list(range(128)))


def test_order_of_keys_does_not_matter() -> None:
    first = prompt_marks(b'{"model":"m","messages":[{"role":"user","content":"a"}]}')
    second = prompt_marks(b'{"messages":[{"content":"a","role":"user"}],"model":"m"}')
    assert first == second


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"null", b"\xff", b'{"prompt": 3}', b'{"messages": {"a": 1}}']
)
def test_a_body_that_is_no_prompt_has_no_chain(body: bytes) -> None:
    assert prompt_marks(body) == ()


@given(st.binary(max_size=300))
def test_no_body_makes_it_fail(body: bytes) -> None:
    prompt_marks(body)


def least(chars_per_token: int | None = 4, **call: Any) -> int:
    return least_tokens(json.dumps(call).encode(), chars_per_token=chars_per_token)


@pytest.mark.parametrize(
    ("call", "tokens"),
    [
        ({"prompt": "x" * 400}, 100),
        ({"prompt": "x" * 401}, 101),
        ({"prompt": ["x" * 400, "x" * 40]}, 100),
        ({"prompt": list(range(70))}, 70),
        ({"prompt": [[1, 2, 3], [4]]}, 3),
        ({"input": "x" * 80}, 20),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 99),
        ({"messages": [{"content": "x" * 400}, {"content": "x" * 400}]}, 198),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 400}]}]}, 98),
        ({"prompt": None, "input": "x" * 8}, 2),
        ({"prompt": {"a": 1}}, 0),
        ({"model": "m"}, 0),
        ({"prompt": "x" * 400, "truncate_prompt_tokens": 9}, 0),
        ({"messages": [None, 3, {"content": None}]}, 0),
    ],
)
def test_what_a_body_can_have_at_least(call: dict[str, Any], tokens: int) -> None:
    assert least(**call) == tokens


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_what_is_no_call_has_no_prompt(body: bytes) -> None:
    assert least_tokens(body, chars_per_token=4) == 0


def test_text_is_not_judged_where_nobody_knows_the_longest_token() -> None:
    assert least(None, prompt="x" * 400) == 0
    assert least(None, prompt=[1, 2, 3]) == 3


@given(
    st.lists(st.lists(st.text(max_size=9), max_size=4), max_size=4),
    st.integers(min_value=1, max_value=9),
)
def test_messages_have_at_least_as_many_tokens_as_it_says(
    texts: list[list[str]], chars_per_token: int
) -> None:
    messages = [{"content": [{"text": text} for text in message]} for message in texts]
    fewest = sum(len(text) for message in texts for text in message) / chars_per_token
    assert least(chars_per_token, messages=messages) <= max(0, fewest)
