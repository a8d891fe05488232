"""Mutated documents and calls find nothing in a control side; and what is broken is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz import control_side


async def test_documents_and_calls_find_nothing(tmp_path: Path) -> None:
    assert await command.fuzz(tmp_path, documents=240, seed=7) == []


async def test_a_view_that_cannot_show_a_policy_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(answer: dict[str, Any], **_: object) -> str:
        return "" if answer["generation"] == 1 else f"{1 / 0}"

    monkeypatch.setattr(control_side, "policy_text", fails)
    found = await command.fuzz(tmp_path, documents=80, seed=7)
    assert found
    assert "the text pages: " in found[0]
    assert "ZeroDivisionError" in found[0]


async def test_text_that_turns_a_terminal_around_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_side, "judgement_text", lambda *_, **__: "a\u202eb")
    found = await command.fuzz(tmp_path, documents=3, seed=7)
    assert "text with ['\\u202e']" in found[0]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", f"/v1/decisions/{'9' * 19}", b"", 404),
        ("GET", f"/v1/decisions/{'9' * 5000}", b"", 404),
        ("GET", "/v1/decisions/1?at=1e400", b"", 404),
        ("GET", "/v1/decisions?limit=99999999999999999999", b"", 400),
        ("GET", "/v1/decisions?%ED%A0%80=1", b"", 400),
        ("POST", "/v1/policy/check", rb'{"document": "\ud800"}', 400),
        ("POST", "/v1/policy/set", rb'{"actor": "a", "key": "\ud800", "value": 1}', 400),
        (
            "POST",
            "/v1/policy/set",
            rb'{"actor": "a", "key": "\u202e", "value": 1, "for_s": 9}',
            422,
        ),
        ("POST", "/v1/policy/set", b'{"actor": "a", "\x7f": 1}', 400),
        ("POST", "/v1/freeze", rb'{"actor": "a\u202eb"}', 200),
        (
            "POST",
            "/v1/policy/unset",
            json.dumps({"actor": "a", "key": "hot.max", "expected_generation": 10**30}).encode(),
            409,
        ),
        (
            "POST",
            "/v1/policy/set",
            json.dumps({"actor": "a", "key": "hot.max", "value": 10**300, "for_s": 1}).encode(),
            422,
        ),
    ],
)
async def test_what_no_number_and_no_text_can_be_is_the_callers_mistake(
    tmp_path: Path, method: str, path: str, body: bytes, status: int
) -> None:
    side = control_side.ControlSide(tmp_path)
    await side.open()
    answer = await side.asked(method, path, body)
    assert answer.status_code == status, answer.text
    assert answer.text.replace("\n", "").isprintable()
    await side.close()
