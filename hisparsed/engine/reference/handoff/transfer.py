"""A prefix on its way between two nodes: pieces of rows, and the frames that carry them.

Sparse-MLA rows live in the host pool on both nodes, indexer rows in the slab. Rows travel in
token order with all layers (or index groups) of a piece together, so block ids stay at home.

Frames are length-prefixed, checked, and bounded in size and in time. One connection carries one
prefix. ``Wire`` knows bytes, not what they mean; nothing here opens sockets.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from hisparsed.engine.reference.model_folder import INDEX_ROW_BYTES, ROW_BYTES, ReferenceGeometry
from hisparsed.engine.reference.store import KVStore

_HEADER = struct.Struct("!II")
"""Payload bytes and their CRC-32."""
_MESSAGE_BYTES = 64 << 10


class HandoffError(Exception):
    """A transfer that did not happen. The text says where, what was seen, the expected value."""


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
        """A longer frame is foreign or damaged; it is not read."""
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


Kind = Literal["rows", "index"]
PIECE_TOKENS = 256
"""Tokens in one frame; at eight layers 256 KiB of sparse-MLA rows."""


@dataclass(frozen=True)
class KindRange:
    """Tokens ``[start, end)`` of one kind of row."""

    kind: Kind
    start: int
    end: int


def pieces(rows_from: int, index_from: int, tokens: int) -> Iterator[KindRange]:
    """The content of a transfer, in its order: sparse-MLA rows, then indexer rows."""
    kinds: tuple[tuple[Kind, int], ...] = (("rows", rows_from), ("index", index_from))
    for kind, first in kinds:
        for start in range(first, tokens, PIECE_TOKENS):
            yield KindRange(kind, start, min(start + PIECE_TOKENS, tokens))


def prefix_digest(token_ids: Sequence[int]) -> str:
    """Names a prefix by its tokens, the same in every process."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def model_shape(geometry: ReferenceGeometry) -> dict[str, Any]:
    """Values on which two nodes must agree, or rows of one mean nothing to the other."""
    shape = asdict(geometry)
    del shape["max_model_len"]
    return {**shape, "row_bytes": ROW_BYTES, "index_row_bytes": INDEX_ROW_BYTES}


class PrefixRows:
    """Reads and writes pieces of prefixes in ``store``.

    A piece is int8 ``[layers, tokens, ROW_BYTES]`` or ``[index groups, tokens,
    INDEX_ROW_BYTES]``. Block lists name a request's blocks from its first token on.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def piece_bytes(self, piece: KindRange) -> int:
        geometry = self._store.geometry
        tokens = piece.end - piece.start
        if piece.kind == "rows":
            return geometry.layers * tokens * ROW_BYTES
        return geometry.index_groups * tokens * INDEX_ROW_BYTES

    def read(self, piece: KindRange, blocks: Sequence[int]) -> torch.Tensor:
        block, offset = self._places(piece, blocks)
        if piece.kind == "rows":
            row = block * self._store.block_size + offset
            return torch.stack([rows.index_select(0, row) for rows in self._store.host_rows])
        return torch.stack([rows[block, offset] for rows in self._store.index_rows])

    def write(self, piece: KindRange, blocks: Sequence[int], data: torch.Tensor) -> None:
        block, offset = self._places(piece, blocks)
        if piece.kind == "rows":
            shaped = data.view(self._store.geometry.layers, -1, ROW_BYTES)
            row = block * self._store.block_size + offset
            for own, new in zip(self._store.host_rows, shaped, strict=True):
                own.index_copy_(0, row, new)
        else:
            shaped = data.view(self._store.geometry.index_groups, -1, INDEX_ROW_BYTES)
            for own, new in zip(self._store.index_rows, shaped, strict=True):
                own[block, offset] = new

    def _places(self, piece: KindRange, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(piece.start, piece.end)
        page = position // self._store.block_size
        if int(page[-1]) >= len(blocks):
            raise ValueError(
                f"{piece.kind} [{piece.start}, {piece.end}): the request holds {len(blocks)} "
                f"blocks of {self._store.block_size} tokens"
            )
        return torch.tensor(blocks)[page], position % self._store.block_size
