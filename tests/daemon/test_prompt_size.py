"""The fewest tokens of a prompt: never more than it can have, exact for token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.daemon.prompt_size import least_tokens


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
