"""Frames between two nodes: length-prefixed, checked, bounded in size and in time.

One connection carries one prefix. Knows bytes, not what they mean; opens no sockets.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct("!II")
"""Payload bytes and their CRC-32."""
_MESSAGE_BYTES = 64 << 10


class HandoffError(Exception):
    """A transfer that did not happen. The text says where, what was seen, what would be right."""


class Wire:
    """Frames over a connected ``sock``, all of them by ``deadline_s`` of ``clock``.

    Every failure is a ``HandoffError``: a peer that is gone, slow, or sends damaged frames.
    """

    def __init__(
        self, sock: socket.socket, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = sock
        self._deadline_s = deadline_s
        self._clock = clock

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        view = memoryview(payload).cast("B")
        try:
            self._arm("send")
            self._socket.sendall(_HEADER.pack(view.nbytes, zlib.crc32(view)) + view)
        except OSError as error:
            raise HandoffError(f"the connection broke while sending: {error}") from error

    def receive(self, most: int) -> bytearray:
        """A longer frame is a stranger's or a damaged one; it is never waited for."""
        length, checksum = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > most:
            raise HandoffError(f"a frame of {length} bytes; at most {most} are right")
        payload = self._exactly(length)
        found = zlib.crc32(payload)
        if found != checksum:
            raise HandoffError(
                f"a frame of {length} bytes is damaged: checksum {found:08x}, sent as "
                f"{checksum:08x}"
            )
        return payload

    def send_message(self, **fields: Any) -> None:
        self.send(json.dumps(fields).encode())

    def receive_message(self) -> dict[str, Any]:
        payload = self.receive(_MESSAGE_BYTES)
        try:
            message = json.loads(payload)
        except ValueError as error:
            raise HandoffError(f"{bytes(payload[:40])!r} is not a JSON message") from error
        if not isinstance(message, dict):
            raise HandoffError(f"a message must be an object, got {type(message).__name__}")
        return message

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        received = 0
        while received < length:
            try:
                self._arm("receive")
                count = self._socket.recv_into(view[received:])
            except OSError as error:
                raise HandoffError(f"the connection broke while receiving: {error}") from error
            if not count:
                raise HandoffError(f"the peer closed the connection {received} bytes into {length}")
            received += count
        return data

    def _arm(self, what: str) -> None:
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise HandoffError(f"no time was left to {what}")
        self._socket.settimeout(left_s)
