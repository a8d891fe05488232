"""The log's form and its stable ids: every line of the daemon has one, and the page lists them."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hisparsed
from hisparsed.logs.event_ids import LINES, WORDLESS
from hisparsed.logs.format import FIELDS, formatter
from hisparsed.policy.events import EventKind
from tests.bench.event_docs import KINDS, document

ROOT = Path(hisparsed.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
ELSEWHERE = {"policy", "kernels", "tui", "etc", "systemd"}
"""Links to the other folders; none of them logs."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in the daemon and in the engine's processes, with its place."""
    for file in sorted(ROOT.rglob("*.py")):
        relative = file.relative_to(ROOT)
        if relative.parts[0] in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"log", "logger"}
                and node.func.attr in LEVELS
            ):
                yield f"{relative}:{node.lineno}", node


def words_of(call: ast.Call) -> str:
    named = isinstance(call.func, ast.Attribute) and call.func.attr == "log"
    words = call.args[1 if named else 0]
    assert isinstance(words, ast.Constant), "words are written where they are logged"
    return str(words.value)


def level_in(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return {"exception": "error"}.get(call.func.attr, call.func.attr)


def test_every_line_has_an_id_and_the_level_of_the_table() -> None:
    found = list(calls())
    assert len(found) > 25
    for place, call in found:
        if any(keyword.arg == "extra" for keyword in call.keywords):
            continue
        words = words_of(call)
        assert words in LINES, f"{place}: put {words!r} into hisparsed/logs/event_ids.py"
        assert LINES[words].level == level_in(call), place


def test_the_table_has_no_line_that_nobody_logs() -> None:
    said = {words_of(call) for _, call in calls()}
    assert LINES.keys() - said == set()


def test_ids_are_unique_and_look_alike() -> None:
    ids = [one.event_id for one in (*LINES.values(), *WORDLESS.values())]
    ids += [kind.value for kind in EventKind if kind is not EventKind.TICK_FAILED]
    assert len(set(ids)) == len(ids)
    assert {one for one in ids if not re.fullmatch(r"[a-z]+(-[a-z]+)*", one)} == set()


def test_the_page_is_what_the_tables_say() -> None:
    page = ROOT.parent / "docs" / "events.md"
    assert page.read_text("utf-8") == document(), (
        "run `python -m tests.bench.event_docs > docs/events.md`"
    )
    assert KINDS.keys() == set(EventKind)
    assert document().count("\n| `") == len(FIELDS) + len(EventKind) + len(LINES) + len(WORDLESS)


def line(words: str, *args: Any, name: str = "hisparsed.daemon", **extra: Any) -> dict[str, Any]:
    record = logging.LogRecord(name, logging.WARNING, "f.py", 1, words, args, None)
    record.__dict__.update(extra)
    shown: dict[str, Any] = json.loads(formatter("json").format(record))
    assert shown.keys() <= FIELDS.keys()
    return shown


def test_a_line_carries_its_id_whatever_its_figures() -> None:
    for percent in (3, 4):
        shown = line("Draining: %d calls open, at most %gs.", percent, 1.0)
        assert shown["event_id"] == "draining"
        assert shown["event"] == f"Draining: {percent} calls open, at most 1s."
    assert shown["process"] == "daemon"
    assert shown["level"] == "warning"
    assert shown["timestamp"].endswith("Z")


def test_lines_of_others_have_no_id() -> None:
    shown = line("Draining: %d calls open, at most %gs.", 3, 1.0, name="vllm.core")
    assert "event_id" not in shown
    assert shown["logger"] == "vllm.core"


def test_a_traceback_is_a_field_of_its_line() -> None:
    record = logging.LogRecord("vllm", logging.ERROR, "f.py", 1, "broke", (), None)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = formatter("json").format(record)
    assert "\n" not in text
    assert "ValueError: two" in json.loads(text)["exception"]
    assert "ValueError: two" in formatter("text").format(record)
