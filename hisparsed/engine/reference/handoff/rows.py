"""A prefix as rows: read from one node's pools, written into another's, in pieces.

Sparse-MLA rows live in the host pool on both nodes, indexer rows in the slab. Rows travel in
token order with all layers (or index groups) of a piece together, so block ids stay at home.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from hisparsed.engine.reference.geometry import INDEX_ROW_BYTES, ROW_BYTES, ReferenceGeometry
from hisparsed.engine.reference.store import KVStore

Kind = Literal["rows", "index"]
PIECE_TOKENS = 256
"""Tokens in one frame; at eight layers 256 KiB of sparse-MLA rows."""


@dataclass(frozen=True)
class Piece:
    """Tokens ``[start, end)`` of one kind of row."""

    kind: Kind
    start: int
    end: int


def pieces(rows_from: int, index_from: int, tokens: int) -> Iterator[Piece]:
    """What travels, in the order in which it travels: sparse-MLA rows, then indexer rows."""
    kinds: tuple[tuple[Kind, int], ...] = (("rows", rows_from), ("index", index_from))
    for kind, first in kinds:
        for start in range(first, tokens, PIECE_TOKENS):
            yield Piece(kind, start, min(start + PIECE_TOKENS, tokens))


def prefix_digest(token_ids: Sequence[int]) -> str:
    """Names a prefix by its tokens, the same in every process."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def model_shape(geometry: ReferenceGeometry) -> dict[str, Any]:
    """What two nodes must agree on, or rows of one mean nothing to the other."""
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

    def piece_bytes(self, piece: Piece) -> int:
        geometry = self._store.geometry
        tokens = piece.end - piece.start
        if piece.kind == "rows":
            return geometry.layers * tokens * ROW_BYTES
        return geometry.index_groups * tokens * INDEX_ROW_BYTES

    def read(self, piece: Piece, blocks: Sequence[int]) -> torch.Tensor:
        block, offset = self._places(piece, blocks)
        if piece.kind == "rows":
            row = block * self._store.block_size + offset
            return torch.stack([rows.index_select(0, row) for rows in self._store.host_rows])
        return torch.stack([rows[block, offset] for rows in self._store.index_rows])

    def write(self, piece: Piece, blocks: Sequence[int], data: torch.Tensor) -> None:
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

    def _places(self, piece: Piece, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(piece.start, piece.end)
        page = position // self._store.block_size
        if int(page[-1]) >= len(blocks):
            raise ValueError(
                f"{piece.kind} [{piece.start}, {piece.end}): the request holds {len(blocks)} "
                f"blocks of {self._store.block_size} tokens"
            )
        return torch.tensor(blocks)[page], position % self._store.block_size
