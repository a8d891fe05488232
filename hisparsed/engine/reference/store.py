"""The bytes of the reference node: a "GPU" slab of interleaved blocks and the host pool.

Built from vLLM's own ``KVCacheConfig``, so offsets and strides are those that vLLM planned.
Knows addresses and copies; does not know requests or policy.

Host memory is one private mapping that is not pinned: whole pages of it go back to the operating
system while requests run. Released pages read as zeros until they are written again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hisparsed.engine.reference.model_folder import (
    INDEX_ROW_BYTES,
    ROW_BYTES,
    ReferenceGeometry,
    indexer_layer_name,
    kv_layer_name,
)


class HostBuffer:
    """``bytes`` is an int8 tensor of ``size`` over the mapping, filled with ``fill``."""

    def __init__(self, size: int, fill: int) -> None:
        # Private: of a shared mapping, the pages would stay with the kernel.
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._map, dtype=torch.int8)
        self.bytes.fill_(fill)

    def release(self, spans: Iterable[tuple[int, int]]) -> int:
        """Give back the whole pages inside ``(start, end)`` byte spans; returns their bytes."""
        released = 0
        for start, end in spans:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, first, length)
                released += length
        return released


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending distinct ids as ``(first, beyond last)`` of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for one in ids:
        if found and found[-1][1] == one:
            found[-1] = (found[-1][0], one + 1)
        else:
            found.append((one, one + 1))
    return found


_POISON = 0x55
"""Unwritten memory is not zero: reading an unwritten row must change tokens."""


class KVStore:
    """Slab and host pool of one engine, and the copies between them.

    ``rows``: the slab as int8 ``[slab_rows, ROW_BYTES]``; row of (block, offset) of a layer
    is ``layer_base[layer] + block * block_rows + offset``.
    ``host_rows[layer]``: int8 ``[host_blocks * block_size, ROW_BYTES]``.
    ``index_rows[group]``: int8 ``[num_blocks, block_size, INDEX_ROW_BYTES]``.
    """

    def __init__(self, kv_cache_config: Any, geometry: ReferenceGeometry, block_size: int) -> None:
        self.block_size = block_size
        self.geometry = geometry
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.host_blocks = int(kv_cache_config.hisparse_host_num_blocks)
        device = [tensor for tensor in kv_cache_config.kv_cache_tensors if not tensor.host_resident]
        host = [tensor for tensor in kv_cache_config.kv_cache_tensors if tensor.host_resident]
        offsets = {
            name: tensor.offset + index * tensor.layer_stride
            for tensor in device
            for index, name in enumerate(tensor.layers)
        }
        block_bytes = device[0].block_stride
        self.slab = torch.full((device[0].size,), _POISON, dtype=torch.int8)
        self._host_buffer = HostBuffer(int(host[0].size), _POISON)
        self.host = self._host_buffer.bytes
        if block_bytes % ROW_BYTES:
            raise ValueError(f"slab block of {block_bytes} B is not a multiple of {ROW_BYTES} B")
        self.block_bytes = block_bytes
        self.block_rows = block_bytes // ROW_BYTES
        self.rows = self.slab.view(-1, ROW_BYTES)
        self.layer_base = [
            offsets[f"{kv_layer_name(layer)}.hisparse_resident"] // ROW_BYTES
            for layer in range(geometry.layers)
        ]
        for layer in range(geometry.layers):
            hot = offsets[f"{kv_layer_name(layer)}.hisparse_hot"]
            if hot != self.layer_base[layer] * ROW_BYTES:
                raise ValueError(f"layer {layer}: hot and resident pages differ in offset")
        self.host_layer_bytes = self.host_blocks * block_size * ROW_BYTES
        host_offsets = {
            name: tensor.offset + index * self.host_layer_bytes
            for tensor in host
            for index, name in enumerate(tensor.layers)
        }
        self.host_offsets = [host_offsets[kv_layer_name(layer)] for layer in range(geometry.layers)]
        self.host_rows = [self._host_layer(offset) for offset in self.host_offsets]
        self.index_rows = [
            self._index_view(offsets[indexer_layer_name(geometry.group_layers(group)[0])])
            for group in range(geometry.index_groups)
        ]

    def _host_layer(self, offset: int) -> torch.Tensor:
        return self.host[offset : offset + self.host_layer_bytes].view(-1, ROW_BYTES)

    def _index_view(self, offset: int) -> torch.Tensor:
        return torch.as_strided(
            self.slab,
            (self.num_blocks, self.block_size, INDEX_ROW_BYTES),
            (self.block_bytes, INDEX_ROW_BYTES, 1),
            offset,
        )

    def indexer_caches(self) -> dict[str, torch.Tensor]:
        """Indexer layers by name, as vLLM's offloading worker registers them."""
        return {
            indexer_layer_name(self.geometry.group_layers(group)[0]): view
            for group, view in enumerate(self.index_rows)
        }

    def host_block_slices(self, block: int) -> list[torch.Tensor]:
        """The layer slices of one host block, int8 ``[block_size * ROW_BYTES]`` each."""
        start = block * self.block_size
        return [rows[start : start + self.block_size].reshape(-1) for rows in self.host_rows]

    def close(self) -> None:
        """Give all memory back. Nothing may be read or written afterwards."""
        self.slab.untyped_storage().resize_(0)
        self._host_buffer.release([(0, self.host.numel())])

    def release_host(self, blocks: Sequence[int]) -> int:
        """Give the memory of host blocks, ascending, back to the operating system.

        Returns the bytes of whole pages that lie inside them; their rows are lost.
        """
        block_bytes = self.block_size * ROW_BYTES
        found = runs(blocks)
        return self._host_buffer.release(
            (offset + first * block_bytes, offset + beyond * block_bytes)
            for offset in self.host_offsets
            for first, beyond in found
        )

    def slab_rows_of(self, layer: int, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Slab row numbers (int64) of (block, offset) pairs of ``layer``."""
        rows: torch.Tensor = block * self.block_rows + offset + self.layer_base[layer]
        return rows

    def copy_host_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole host blocks ``(source, destination)`` over all layers."""
        for source, destination in pairs:
            for source_slice, destination_slice in zip(
                self.host_block_slices(source), self.host_block_slices(destination), strict=True
            ):
                destination_slice.copy_(source_slice)

    def copy_page(self, host_block: int, resident_blocks: Sequence[int], *, restore: bool) -> None:
        """Copy one page of all layers, slab to host, or host to slab when ``restore``."""
        start = host_block * self.block_size
        for group, block in enumerate(resident_blocks):
            for layer in self.geometry.group_layers(group):
                row = self.layer_base[layer] + block * self.block_rows
                page = self.rows[row : row + self.block_size]
                copy = self.host_rows[layer][start : start + self.block_size]
                if restore:
                    page.copy_(copy)
                else:
                    copy.copy_(page)

    def mirror_rows(self, mirrors: Sequence[Any]) -> int:
        """Copy freshly written rows to their host rows; returns the bytes copied.

        ``mirrors`` are vLLM's ``SparseKVRowMirror``: a start row (block * block_size +
        offset) for each resident group, a host start row and a count.
        """
        if not mirrors:
            return 0
        counts = np.fromiter((mirror.num_rows for mirror in mirrors), np.int64, len(mirrors))
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        destinations = np.repeat(
            np.fromiter((mirror.destination_start for mirror in mirrors), np.int64, len(mirrors)),
            counts,
        )
        destination = torch.from_numpy(destinations + within)
        for group in range(self.geometry.index_groups):
            starts = np.fromiter(
                (mirror.source_starts[group] for mirror in mirrors), np.int64, len(mirrors)
            )
            source = torch.from_numpy(np.repeat(starts, counts) + within)
            block, offset = source // self.block_size, source % self.block_size
            for layer in self.geometry.group_layers(group):
                rows = self.rows.index_select(0, self.slab_rows_of(layer, block, offset))
                self.host_rows[layer].index_copy_(0, destination, rows)
        return int(counts.sum()) * ROW_BYTES * self.geometry.layers
