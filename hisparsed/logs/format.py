"""The form of a log line in every process of a node: JSON for collectors, text for people.

The same form serves the daemon's lines, vLLM's and those of libraries. ``event_ids`` knows the
stable id of a line.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any, Final, Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from hisparsed.logs.event_ids import event_id_of
from hisparsed.logs.privacy import TRACEBACK

LogFormat = Literal["json", "text"]

FIELDS: Final = {
    "timestamp": "when, UTC, ISO 8601",
    "level": "debug, info, warning, error or critical",
    "logger": "name of the logger: `hisparsed.*`, `vllm.*` or a library",
    "process": "`daemon`, or the name of the engine's process",
    "event": "the message; for people, may change",
    "event_id": "stable; only on lines of the tables below",
    "actor": "who caused it, on lines of events",
    "exception": "a traceback, where there is one",
}
"""The fields of a JSON line."""


def formatter(form: LogFormat, *, colors: bool = False) -> logging.Formatter:
    """For handlers of Python's logging."""
    last: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "text":
        last.append(structlog.dev.ConsoleRenderer(colors=colors))
    else:
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_origin,
        ],
        processors=last,
    )


def _add_origin(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    in_daemon = multiprocessing.parent_process() is None
    event["process"] = "daemon" if in_daemon else record.processName
    event_id = getattr(record, "event_id", None) or event_id_of(record)
    if event_id is not None:
        event["event_id"] = event_id
    actor = getattr(record, "actor", None)
    if actor is not None:
        event["actor"] = actor
    frames = getattr(record, TRACEBACK, None)
    if frames is not None:
        event["exception"] = frames
    return event
