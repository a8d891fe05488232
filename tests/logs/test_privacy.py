"""Nothing that a client sent is in the log: not in words, not in tracebacks, whatever logs it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from typing import Any

import pytest

from hisparsed.logs.privacy import SEES_TEXT, begin_call, without_text
from hisparsed.logs.process import ProcessHandler
from hisparsed.logs.ring import LogRing, RingHandler

SECRET = "zanzibarqx"


def record(name: str, words: Any, *args: Any, error: bool = False) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "f.py", 1, words, args, None)
    if error:
        try:
            try:
                raise ValueError(f"input_value='{SECRET}'")
            except ValueError as cause:
                raise TypeError(f"in {SECRET}") from cause
        except TypeError:
            made.exc_info = sys.exc_info()
    return made


def shown(made: logging.LogRecord, capfd: pytest.CaptureFixture[str]) -> str:
    """All that a process's handler makes of it."""
    ring = LogRing()
    handler = ProcessHandler("json")
    handler.others.append(RingHandler(ring))
    handler.handle(made)
    return capfd.readouterr().err + "".join(line.text for line in ring.lines(limit=9))


@pytest.mark.parametrize("name", [*SEES_TEXT, f"{SEES_TEXT[0]}.serve.protocol"])
def test_who_sees_text_is_not_quoted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(record(name, "call %d of %s failed: %r", 7, "model", {"prompt": SECRET}), capfd)
    assert SECRET not in text
    assert text.count("call 7 of <str> failed: '<dict>'") == 2


def test_a_traceback_keeps_frames_and_types_and_loses_its_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = shown(record("vllm.entrypoints.x", "caught", error=True), capfd)
    assert SECRET not in text
    assert "builtins.TypeError" in text
    assert "builtins.ValueError" in text
    assert "in record" in text, "the frame"


@pytest.mark.parametrize("words", [ValueError(SECRET), {"prompt": SECRET}])
def test_words_that_are_no_words_are_named_by_their_type(
    words: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert SECRET not in shown(record("vllm.entrypoints", words), capfd)


def test_arguments_by_name_are_treated_alike(capfd: pytest.CaptureFixture[str]) -> None:
    made = record("vllm.renderers", "%(n)d of %(text)s", {"n": 3, "text": SECRET})
    assert "3 of <str>" in shown(made, capfd)


def test_a_figure_that_is_text_does_not_break_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert "%d calls" in shown(record("vllm.renderers", "%d calls", SECRET), capfd)


async def test_what_anybody_logs_while_a_call_is_handled_is_not_quoted() -> None:
    made = record("some.library", "got %s", SECRET, error=True)

    async def within() -> logging.LogRecord:
        begin_call()
        return await asyncio.create_task(asyncio.to_thread(without_text, made))

    safe = await asyncio.create_task(within())
    assert safe.getMessage() == "got <str>"
    assert safe.exc_info is None
    assert without_text(made) is made, "the other tasks' lines are whole"


def test_our_own_lines_are_whole_in_a_call_too() -> None:
    made = record("hisparsed.daemon", "Draining: %s", "soon")

    def within() -> logging.LogRecord:
        begin_call()
        return without_text(made)

    assert contextvars.copy_context().run(within).getMessage() == "Draining: soon"
