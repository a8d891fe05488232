"""Half of a character anywhere in a body is found; what is whole, or no JSON, passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparsed.daemon.half_characters import half_character


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
    found = half_character(json.dumps(call).encode())
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
    assert half_character(body) is None
