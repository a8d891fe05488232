"""The layout of indexer chunks in lent host blocks, and their free slots. Pure.

A HiSparse host block has one slice per layer, and the slices are not contiguous. End to end they
form the block's logical bytes; chunks are packed into those from the start, so a chunk is a few
pieces, each inside one layer's slice. Both the scheduler's ledger and the workers that copy derive
everything from this one description.

Free slots are kept by block, every step O(1). Partly filled blocks are filled first, so that whole
blocks stay free for a recall.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any


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


def chunk_layout(config: Any, source_group: int, copies: int = 1) -> ChunkLayout:
    """The layout of the indexer group's chunks, with all ``copies`` of a chunk next to each other,
    in blocks of the HiSparse source group before it."""
    source = config.kv_cache_groups[source_group]
    indexer = config.kv_cache_groups[source_group + 1]
    layers = len(source.layer_names)
    return ChunkLayout(
        layers=layers,
        slice_bytes=_group_bytes(source) // layers,
        chunk_bytes=_group_bytes(indexer) * copies,
    )


def _group_bytes(group: Any) -> int:
    """Bytes of one block over all layers of a cache group, flattened or not."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is not None:
        return sum(int(specs[name].page_size_bytes) for name in group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


class FreeSlots:
    """A free list by block; ``len`` is the number of free slots."""

    def __init__(self) -> None:
        self._by_block: OrderedDict[int, list[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: int, slots: Iterable[int]) -> None:
        """A newly lent block: its slots are taken, in the order given, after all others."""
        reversed_slots = list(slots)[::-1]
        if not reversed_slots:
            return
        self._by_block[block] = reversed_slots
        self._by_block.move_to_end(block, last=False)
        self._count += len(reversed_slots)

    def take(self) -> int:
        """Raises ``IndexError`` when no slot is free."""
        if not self._by_block:
            raise IndexError("no free slot")
        block = next(reversed(self._by_block))
        slots = self._by_block[block]
        slot = slots.pop()
        if not slots:
            del self._by_block[block]
        self._count -= 1
        return slot

    def put(self, block: int, slot: int) -> None:
        """A slot of ``block`` is free again, and one of the next to be used."""
        self._by_block.setdefault(block, []).append(slot)
        self._count += 1

    def drop(self, block: int) -> None:
        """Forget the free slots of a block that is being recalled."""
        self._count -= len(self._by_block.pop(block, ()))

    def of_block(self, block: int) -> int:
        """How many slots of ``block`` are free."""
        return len(self._by_block.get(block, ()))

    def clear(self) -> None:
        self._by_block.clear()
        self._count = 0
