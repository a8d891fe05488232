"""A service manager's end of the notify protocol: a datagram socket and what came in on it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class NotifySocket:
    """Collects messages as they come; the kernel keeps only a few that nobody reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._reader.join()
        self._socket.close()

    def having(self, name: str) -> list[str]:
        """The values of one variable, in order."""
        return [message[name] for message in list(self.messages) if name in message]

    def place(self, name: str) -> int:
        """Where among the messages the first with ``name`` stands; raises ``StopIteration``."""
        return next(place for place, one in enumerate(list(self.messages)) if name in one)

    def _read(self) -> None:
        while message := self._socket.recv(4096).decode():
            pairs = (line.partition("=") for line in message.splitlines())
            self.messages.append({name: value for name, _, value in pairs})
