"""The chain of a prompt: a session's next call repeats it, other sessions do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.daemon.prompt_prefix import prompt_marks


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
