"""A TCP relay between two nodes that does one thing wrong, at one byte of the answer.

So that a failure can be put at any stage of a transfer without touching either node.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal, Self

Fault = Literal["cut", "flip", "stall"]


class FaultyRelay:
    """Relays to ``port``. The byte ``at`` of the first answer is lost, changed, or never comes."""

    def __init__(self, port: int, fault: Fault, at: int) -> None:
        self._target = port
        self._fault: Fault | None = fault
        self._at = at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *raised: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            node = socket.create_connection(("127.0.0.1", self._target))
            self._open += [reader, node]
            fault, self._fault = self._fault, None
            for source, sink, wrong in ((reader, node, None), (node, reader, fault)):
                thread = threading.Thread(
                    target=self._relay, args=(source, sink, wrong), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, fault: Fault | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                here = self._at - passed
                if fault is not None and here < len(data):
                    if fault == "flip":
                        data = data[:here] + bytes([data[here] ^ 1]) + data[here + 1 :]
                        fault = None
                    else:
                        sink.sendall(data[:here])
                        if fault == "cut":
                            break
                        while source.recv(4096):
                            """The rest is swallowed until an end gives up."""
                        return
                sink.sendall(data)
                passed += len(data)
            for sock in (source, sink):
                sock.shutdown(socket.SHUT_RDWR)
