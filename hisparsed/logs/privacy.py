"""Keeps what clients send out of the log, whichever code logs it.

vLLM's API side quotes calls: the traceback of a validation error holds the whole body. Lines
logged while a call is handled, or by loggers that see text, keep their numbers; every other
argument becomes the name of its type. Tracebacks keep frames and types.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

SEES_TEXT: Final = (
    "vllm.entrypoints",
    "vllm.inputs",
    "vllm.multimodal",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tokenizers",
    "vllm.tool_parsers",
    "vllm.v1.structured_output",
)
"""Loggers, with those below them, that may quote a call in any process."""

_REFUSES: Final = "vllm.entrypoints.anthropic.api_router"
"""Logs each call that it refuses with 400 as an error with a traceback."""
_CLIENTS_FAULT: Final = (ValueError, TypeError, OverflowError)
"""Errors that vLLM answers with status 400."""

OWN: Final = "hisparsed"
"""hisparsed's own lines insert only figures and names."""

TRACEBACK: Final = "traceback_text"
"""The attribute of a record that has a traceback without its words."""

_in_call: ContextVar[bool] = ContextVar("in_call", default=False)


def begin_call() -> None:
    """From now on, log lines of this task and of its child tasks may quote a call."""
    _in_call.set(True)


def without_text(record: logging.LogRecord) -> logging.LogRecord:
    """The record, or a copy from which nothing of a call can be read."""
    if not _may_quote(record.name):
        return record
    safe = logging.makeLogRecord(record.__dict__)
    safe.msg, safe.args = _words(record), ()
    if record.name == _REFUSES and isinstance((record.exc_info or (None, None))[1], _CLIENTS_FAULT):
        safe.levelno, safe.levelname = logging.INFO, "INFO"
    elif record.exc_info and record.exc_info[1] is not None:
        setattr(safe, TRACEBACK, _frames(record.exc_info[1]))
    safe.exc_info = safe.exc_text = None
    return safe


def _may_quote(name: str) -> bool:
    if name.partition(".")[0] == OWN:
        return False
    return _in_call.get() or any(
        name == known or name.startswith(f"{known}.") for known in SEES_TEXT
    )


def _words(record: logging.LogRecord) -> str:
    if not isinstance(record.msg, str):
        return _named(record.msg)
    args = record.args
    if not args:
        return record.msg
    plain: Any = (
        {key: _plain(value) for key, value in args.items()}
        if isinstance(args, Mapping)
        else tuple(_plain(value) for value in args)
    )
    try:
        return str(record.msg % plain)
    except (TypeError, ValueError, KeyError):
        return record.msg


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else _named(value)


def _named(value: object) -> str:
    return f"<{type(value).__name__}>"


def _frames(error: BaseException) -> str:
    """As Python shows an error with its causes, without their messages."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        stack = "".join(traceback.format_tb(current.__traceback__))
        name = f"{type(current).__module__}.{type(current).__qualname__}"
        parts.append(f"Traceback (most recent call last):\n{stack}{name}\n")
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return "\nwhich came of\n\n".join(parts).rstrip("\n")
