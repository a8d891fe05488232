"""Indexer chunks of the reference node: copied between the slab and lent host blocks.

The worker half of the offload pool. Chunks are addressed by id alone; block, slot and pieces
follow from the chunk layout, as on every node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult

from hisparsed.engine.chunks import ChunkLayout
from hisparsed.engine.offload import LentOffloadingSpec
from hisparsed.engine.reference.geometry import INDEX_ROW_BYTES, ROW_BYTES
from hisparsed.engine.reference.store import KVStore


def reference_chunk_layout(store: KVStore) -> ChunkLayout:
    geometry = store.geometry
    return ChunkLayout(
        layers=geometry.layers,
        slice_bytes=store.block_size * ROW_BYTES,
        chunk_bytes=store.block_size * INDEX_ROW_BYTES * geometry.index_groups,
    )


class LentChunkWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at submission; results are handed out at the next ``get_finished``."""

    def __init__(self, store: KVStore, layout: ChunkLayout) -> None:
        self._store = store
        self._layout = layout
        self._host_blocks = [
            rows.view(store.host_blocks, store.block_size * ROW_BYTES) for rows in store.host_rows
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        pages = self._read_pages(src_spec.block_ids.tolist())
        for indices, slot, blocks in self._by_slot(dst_spec.block_ids.tolist()):
            for piece in self._layout.pieces(slot):
                data = pages[indices, piece.chunk_offset : piece.chunk_offset + piece.length]
                span = slice(piece.slice_offset, piece.slice_offset + piece.length)
                self._host_blocks[piece.layer][blocks, span] = data
        self._finish(job_id, pages)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """All loads end at once, so ``expedited`` ones (since vLLM 0.33) need nothing more."""
        chunk_ids = src_spec.block_ids.tolist()
        pages = torch.empty((len(chunk_ids), self._layout.chunk_bytes), dtype=torch.int8)
        for indices, slot, blocks in self._by_slot(chunk_ids):
            for piece in self._layout.pieces(slot):
                span = slice(piece.slice_offset, piece.slice_offset + piece.length)
                data = self._host_blocks[piece.layer][blocks, span]
                pages[indices, piece.chunk_offset : piece.chunk_offset + piece.length] = data
        self._write_pages(dst_spec.block_ids.tolist(), pages)
        self._finish(job_id, pages)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies end before submission returns."""

    def _finish(self, job_id: int, pages: torch.Tensor) -> None:
        size = pages.numel()
        self._finished.append(TransferResult(job_id, True, transfer_size=size, transfer_time=1e-9))

    def _read_pages(self, slab_blocks: list[int]) -> torch.Tensor:
        index = torch.tensor(slab_blocks, dtype=torch.int64)
        return torch.cat([view[index].flatten(1) for view in self._store.index_rows], dim=1)

    def _write_pages(self, slab_blocks: list[int], pages: torch.Tensor) -> None:
        index = torch.tensor(slab_blocks, dtype=torch.int64)
        page_bytes = self._store.block_size * INDEX_ROW_BYTES
        for group, view in enumerate(self._store.index_rows):
            page = pages[:, group * page_bytes : (group + 1) * page_bytes]
            view[index] = page.reshape(len(slab_blocks), self._store.block_size, INDEX_ROW_BYTES)

    def _by_slot(self, chunk_ids: Sequence[int]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """Chunks grouped by slot: (positions in the list, slot, host blocks)."""
        groups: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, chunk_id in enumerate(chunk_ids):
            block, slot = self._layout.locate(chunk_id)
            groups[slot][0].append(index)
            groups[slot][1].append(block)
        return [
            (torch.tensor(indices), slot, torch.tensor(blocks))
            for slot, (indices, blocks) in groups.items()
        ]


class ReferenceOffloadingSpec(LentOffloadingSpec):
    """Named in ``spec_name``; the executor attaches its store before the worker is asked for."""

    store: KVStore | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.store is None:
            raise RuntimeError("the reference executor has not attached its store to the spec")
        return LentChunkWorker(self.store, reference_chunk_layout(self.store))
