"""How many answers a call asks for, told from its body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparsed.daemon.answer_count import answers_asked


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
