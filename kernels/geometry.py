"""Addresses: from a row number to its place in the slab and in the host pool.

Numbers only, checked once when a node starts. Knows no tensors and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Geometry:
    """Row arithmetic of one index group; all fields count rows or blocks.

    A physical row is ``block * block_size + offset``; its attention index is ``block *
    attention_block_stride + offset``. Block ids of 0 or less are null everywhere.
    ``resident_by_state`` says that the resident table has one row per state row (vLLM's layout)
    instead of one per request. Raises ``ValueError`` on impossible sizes.
    """

    block_size: int
    attention_block_stride: int
    slab_blocks: int
    host_blocks: int
    resident_by_state: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "slab_blocks", "host_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.attention_block_stride < self.block_size:
            raise ValueError(
                f"attention_block_stride must be at least block_size ({self.block_size} rows), "
                f"got {self.attention_block_stride}"
            )

    @property
    def host_rows(self) -> int:
        """Rows of the host pool; a host row at or beyond this is invalid."""
        return self.host_blocks * self.block_size

    @property
    def attention_fits_int32(self) -> bool:
        return self.slab_blocks * self.attention_block_stride - 1 <= INT32_MAX


@dataclass(frozen=True)
class RowLayout:
    """Byte addresses of the rows of every layer that shares one swap list.

    Host row ``h`` of layer ``l`` starts at ``host_offsets[l] + (h // block_size) *
    host_block_bytes + (h % block_size) * row_bytes``; slab rows likewise. A host pool that is
    contiguous per layer has ``host_block_bytes = block_size * row_bytes``.
    """

    block_size: int
    row_bytes: int
    host_block_bytes: int
    slab_block_bytes: int
    host_offsets: tuple[int, ...]
    slab_offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.row_bytes < 1:
            raise ValueError(
                "block_size and row_bytes must be at least 1, "
                f"got {self.block_size} and {self.row_bytes}"
            )
        page_bytes = self.block_size * self.row_bytes
        for name in ("host_block_bytes", "slab_block_bytes"):
            if getattr(self, name) < page_bytes:
                raise ValueError(
                    f"{name} must hold a page of {page_bytes} B "
                    f"({self.block_size} rows of {self.row_bytes} B), got {getattr(self, name)}"
                )
        if len(self.host_offsets) != len(self.slab_offsets) or not self.host_offsets:
            raise ValueError(
                "host_offsets and slab_offsets name the same layers, at least one; "
                f"got {len(self.host_offsets)} and {len(self.slab_offsets)}"
            )
        if min(*self.host_offsets, *self.slab_offsets) < 0:
            raise ValueError("layer offsets are bytes from the start of the memory, none below 0")

    @property
    def layers(self) -> int:
        return len(self.host_offsets)

    def host_rows(self, memory_bytes: int) -> int:
        """Host rows in a pool of this many bytes; a row at or beyond this is outside."""
        return self._rows(memory_bytes, self.host_offsets, self.host_block_bytes)

    def slab_rows(self, memory_bytes: int) -> int:
        """As ``host_rows``, of the slab."""
        return self._rows(memory_bytes, self.slab_offsets, self.slab_block_bytes)

    def _rows(self, memory_bytes: int, offsets: tuple[int, ...], block_bytes: int) -> int:
        # Whole blocks on the layer that starts last: a row outside is outside on every layer.
        page_bytes = self.block_size * self.row_bytes
        blocks = (memory_bytes - max(offsets) - page_bytes) // block_bytes + 1
        return max(blocks, 0) * self.block_size
