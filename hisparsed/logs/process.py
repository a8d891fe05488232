"""The one log handler of a process, of the daemon and of each process that vLLM starts.

vLLM sets up logging when it is imported, in every process and in some of them again. It is given a
document that names the handler here, so its lines have the daemon's form from the first on.

Lines of the engine process also go to the daemon, as datagrams on a Unix socket, so that the daemon
can show them, also the last ones of an engine that dies. Lines that cannot be sent at once are
dropped: logging must never delay a step. Both ends are here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from hisparsed.logs.format import LogFormat, formatter
from hisparsed.logs.privacy import without_text

LOG_SOCKET_ENV = "HISPARSED_LOG_SOCKET"
"""Set by the daemon for the engine process."""

_LONGEST_TEXT = 4_000
_DATAGRAM_BYTES = 65_536
_JOIN_S = 2.0

AddLine = Callable[[float, int, str, str], None]
"""Unix seconds, level, logger, text."""


class ForwardHandler(logging.Handler):
    """Sends each record; drops it if the daemon has gone or is too slow."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:_LONGEST_TEXT]
        except Exception:
            self.handleError(record)
            return
        line = json.dumps([record.created, record.levelno, record.name, text])
        with contextlib.suppress(OSError):
            self._socket.sendto(line.encode(), self._path)

    def close(self) -> None:
        self._socket.close()
        super().close()


class EngineLogReceiver:
    """In the daemon: reads on a thread, since the start of an engine blocks the event loop.

    ``start`` names the socket in the environment of processes started later.
    """

    def __init__(self, add: AddLine) -> None:
        self._add = add
        self._folder = tempfile.TemporaryDirectory(prefix="hisparsed-log-")
        self._path = Path(self._folder.name) / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._thread = threading.Thread(target=self._read, name="engine-log", daemon=True)

    def start(self) -> None:
        os.environ[LOG_SOCKET_ENV] = str(self._path)
        self._thread.start()

    def close(self) -> None:
        """Also reads the lines that were sent before."""
        os.environ.pop(LOG_SOCKET_ENV, None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.settimeout(_JOIN_S)
            with contextlib.suppress(OSError):
                last.sendto(b"", str(self._path))
                self._thread.join(_JOIN_S)
        self._socket.close()
        self._folder.cleanup()

    def _read(self) -> None:
        while datagram := self._socket.recv(_DATAGRAM_BYTES):
            with contextlib.suppress(Exception):  # one line's
                at_unix_s, level, logger, text = json.loads(datagram)
                self._add(float(at_unix_s), int(level), str(logger), str(text))


CONFIG_ENV: Final = "VLLM_LOGGING_CONFIG_PATH"
"""The variable in which vLLM finds the document."""
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
    """This process's handler; in a process of the engine it also sends lines to the daemon."""
    form: LogFormat = "text" if os.environ.get(FORMAT_ENV) == "text" else "json"
    handler = ProcessHandler(form, colors=form == "text" and sys.stderr.isatty())
    path = os.environ.get(LOG_SOCKET_ENV)
    if path and multiprocessing.parent_process() is not None:
        handler.others.append(ForwardHandler(path))
        logging.captureWarnings(True)
    return handler


def logging_document(level: str) -> dict[str, Any]:
    """The logging configuration of vLLM and the daemon; ``level`` as in Python's logging."""
    loud = {"handlers": ["process"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"process": {"()": f"{__name__}.{process_handler.__name__}"}},
        "root": {"handlers": ["process"], "level": "WARNING"},
        "loggers": dict.fromkeys(_LOUD, loud),
    }


def write_logging_document(folder: Path, level: str) -> Path:
    """The file for processes that start later."""
    path = folder / "logging.json"
    path.write_text(json.dumps(logging_document(level)), encoding="utf-8")
    return path
