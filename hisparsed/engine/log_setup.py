"""The one log handler of a process: of the daemon, and of each process that vLLM starts.

vLLM sets up logging when it is imported, in every process and in some of them again. It is given a
document that names the handler here, so its lines come out as the daemon's do, from the first.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

from hisparsed.control.log_form import LogFormat, formatter
from hisparsed.control.log_privacy import without_text
from hisparsed.engine.log_forward import LOG_SOCKET_ENV, ForwardHandler

CONFIG_ENV: Final = "VLLM_LOGGING_CONFIG_PATH"
"""Where vLLM looks for the document."""
FORMAT_ENV: Final = "HISPARSED_LOG_FORMAT"
"""Set by the daemon for the engine's processes."""

_STDERR: Final = 2
_LOUD: Final = ("hisparsed", "vllm")
"""Logged from the configured level on; libraries from warnings on."""


class ProcessHandler(logging.StreamHandler[Any]):
    """Writes to standard error, and hands each record to ``others`` too, without clients' text.

    They are not handlers of the loggers, because setting logging up again would drop them.
    """

    def __init__(self, form: LogFormat, *, colors: bool = False) -> None:
        # Not sys.stderr: vLLM puts the process's name before every line that goes through it.
        super().__init__(open(_STDERR, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        self.setFormatter(formatter(form, colors=colors))
        self.others: list[logging.Handler] = []

    def emit(self, record: logging.LogRecord) -> None:
        safe = without_text(record)
        super().emit(safe)
        for other in self.others:
            other.handle(safe)


@cache
def process_handler() -> ProcessHandler:
    """This process's handler; in a process of the engine it also tells the daemon."""
    form: LogFormat = "text" if os.environ.get(FORMAT_ENV) == "text" else "json"
    handler = ProcessHandler(form, colors=form == "text" and sys.stderr.isatty())
    path = os.environ.get(LOG_SOCKET_ENV)
    if path and multiprocessing.parent_process() is not None:
        handler.others.append(ForwardHandler(path))
        logging.captureWarnings(True)
    return handler


def logging_document(level: str) -> dict[str, Any]:
    """What vLLM and the daemon set their logging up with; ``level`` as in Python's logging."""
    loud = {"handlers": ["process"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"process": {"()": f"{__name__}.{process_handler.__name__}"}},
        "root": {"handlers": ["process"], "level": "WARNING"},
        "loggers": dict.fromkeys(_LOUD, loud),
    }


def write_logging_document(folder: Path, level: str) -> Path:
    """The file for processes that begin later."""
    path = folder / "logging.json"
    path.write_text(json.dumps(logging_document(level)), encoding="utf-8")
    return path
