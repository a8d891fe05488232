"""How indexer chunks lie inside lent host blocks: pure arithmetic on bytes.

A HiSparse host block is one slice a layer, and the slices are not neighbours in memory. Laid
end to end they form the block's logical bytes; chunks are packed into those from the start,
so a chunk is a few pieces, each inside one layer's slice. Both the scheduler's ledger and
the workers that copy derive everything from this one description.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Piece:
    """``length`` bytes of a chunk at ``chunk_offset``, in ``layer``'s slice at ``slice_offset``."""

    layer: int
    slice_offset: int
    chunk_offset: int
    length: int


@dataclass(frozen=True)
class ChunkLayout:
    """Packing of ``chunk_bytes`` chunks into blocks of ``layers`` slices of ``slice_bytes``."""

    layers: int
    slice_bytes: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.slice_bytes, self.chunk_bytes) < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if self.chunk_bytes > self.block_bytes:
            raise ValueError(
                f"an indexer chunk of {self.chunk_bytes} B does not fit a host block of "
                f"{self.block_bytes} B; lower blocks_per_chunk"
            )

    @property
    def block_bytes(self) -> int:
        return self.layers * self.slice_bytes

    @cached_property
    def chunks_per_block(self) -> int:
        return self.block_bytes // self.chunk_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of a lent block that no chunk uses."""
        return self.block_bytes - self.chunks_per_block * self.chunk_bytes

    def locate(self, chunk_id: int) -> tuple[int, int]:
        """Host block and slot of a chunk id."""
        return divmod(chunk_id, self.chunks_per_block)

    def chunk_ids(self, block_id: int) -> range:
        """Chunk ids inside ``block_id``; ids are unique over the whole host pool."""
        start = block_id * self.chunks_per_block
        return range(start, start + self.chunks_per_block)

    def pieces(self, slot: int) -> tuple[Piece, ...]:
        """Pieces of the chunk in ``slot``, in chunk order.

        Raises ``ValueError`` for a slot that is not in the block.
        """
        if not 0 <= slot < self.chunks_per_block:
            raise ValueError(f"slot {slot} is not in 0..{self.chunks_per_block - 1}")
        return _pieces(self, slot)


@lru_cache(maxsize=4096)
def _pieces(layout: ChunkLayout, slot: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    done = 0
    while done < layout.chunk_bytes:
        layer, offset = divmod(slot * layout.chunk_bytes + done, layout.slice_bytes)
        length = min(layout.slice_bytes - offset, layout.chunk_bytes - done)
        pieces.append(Piece(layer, offset, done, length))
        done += length
    return tuple(pieces)
