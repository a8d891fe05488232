"""Log lines of the engine process, sent to the daemon as datagrams on a Unix socket.

So that the daemon can show them, also the last ones of an engine that dies. What cannot be
sent at once is left out: logging must never hold up a step. Both ends are here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

LOG_SOCKET_ENV = "HISPARSED_LOG_SOCKET"
"""Set by the daemon for the engine process."""

_LONGEST_TEXT = 4_000
_DATAGRAM_BYTES = 65_536
_JOIN_S = 2.0

AddLine = Callable[[float, int, str, str], None]
"""Unix seconds, level, logger, text."""


class ForwardHandler(logging.Handler):
    """Sends each record; drops it where the daemon is gone or behind."""

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
    """In the daemon: reads on a thread, since the start of an engine holds up the event loop.

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
        """Also takes in what was sent before."""
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
