"""The worker side of vLLM's KV connectors on the reference node, in step order.

HiSparse: host block copies, page transfers (also restores after an import) and row mirrors,
acknowledged after a configurable number of steps, as a DMA engine would. Hand-over, where the
node takes part in it: ``HandoffConnector``. Offloading: vLLM's own worker class over
``LentChunkWorker``, which copies indexer chunks between the slab and lent host blocks. Chunks
are addressed by id alone; block, slot and pieces follow from the chunk layout, as on every node.
Metadata comes as MultiConnector's tuple.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorMetadata,
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput

from hisparsed.engine.host.chunks import ChunkLayout
from hisparsed.engine.host.offload import LentOffloadingSpec
from hisparsed.engine.reference.model_folder import INDEX_ROW_BYTES, ROW_BYTES
from hisparsed.engine.reference.store import KVStore

if TYPE_CHECKING:
    from hisparsed.engine.reference.handoff.connector import HandoffConnector


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


class HiSparseTransfers:
    """Row mirrors and page transfers in flight, as ``eager_host_mirror`` divides the work.

    With it every row written is mirrored at once, and a page that goes to the host moves nothing.
    Without it decode rows wait for their page, and the page is copied when its transfer is
    acknowledged, which is the latest moment that vLLM allows, so that a page reused too early
    shows.
    """

    def __init__(self, store: KVStore, ack_lag_steps: int, eager_host_mirror: bool) -> None:
        self._store = store
        self._lag = ack_lag_steps
        self._eager = eager_host_mirror
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._step = 0
        self._copied: list[int] = []
        self._mirrors: list[Any] = []
        self._restored: list[int] = []
        self.mirrored_bytes = 0
        self.spilled_pages = 0

    def before_forward(
        self, metadata: HiSparseConnectorMetadata, decoding: Collection[str]
    ) -> None:
        """``decoding``: requests whose rows of this step are of generated tokens."""
        self._step += 1
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in metadata.host_block_copies]
        self._store.copy_host_blocks(copies)
        self._copied.extend(destination for _, destination in copies)
        transfers = metadata.command.page_transfers if metadata.command is not None else []
        for transfer in transfers:
            if transfer.restore:
                self._store.copy_page(
                    transfer.host_block_id, transfer.resident_block_ids, restore=True
                )
                self._restored.append(transfer.transfer_id)
            else:
                self._in_flight.append((self._step + self._lag, transfer))
        self._mirrors = [
            mirror
            for request_id, mirrors in metadata.row_mirrors.items()
            if self._eager or request_id not in decoding
            for mirror in mirrors
        ]

    def after_forward(self) -> HiSparseConnectorWorkerMetadata | None:
        self.mirrored_bytes += self._store.mirror_rows(self._mirrors)
        self._mirrors = []
        done, self._restored = self._restored, []
        while self._in_flight and self._in_flight[0][0] <= self._step:
            _, transfer = self._in_flight.popleft()
            if not self._eager:
                self._store.copy_page(
                    transfer.host_block_id, transfer.resident_block_ids, restore=False
                )
                self.spilled_pages += 1
            done.append(transfer.transfer_id)
        copied, self._copied = self._copied, []
        if not done and not copied:
            return None
        acknowledged = dict.fromkeys(done, 1)
        return HiSparseConnectorWorkerMetadata(acknowledged, dict(acknowledged), tuple(copied))


class ReferenceConnectors:
    """The workers of all connectors behind one call before and one after the forward."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, store: KVStore, lag: int) -> None:
        eager = bool(vllm_config.attention_config.hisparse_config.eager_host_mirror)
        self._hisparse = HiSparseTransfers(store, lag, eager)
        configs = MultiConnector._get_connector_classes_and_configs(vllm_config)
        names = [connector.__name__ for connector, _ in configs]
        allowed = ["HiSparseConnector", "HandoffConnector", "OffloadingConnector"]
        if names not in (allowed, [allowed[0], allowed[2]]):
            raise ValueError(
                f"the reference node needs MultiConnector({', '.join(allowed)}), the second one "
                f"only where prefixes are handed over; got {names}"
            )
        self._handoff: HandoffConnector | None = None
        if len(configs) > 2:
            from hisparsed.engine.reference.handoff.connector import HandoffConnector

            handoff_config = configs[1][1]
            self._handoff = HandoffConnector(
                handoff_config, KVConnectorRole.WORKER, kv_cache_config
            )
            self._handoff.attach(store)
        offload_config = configs[-1][1]
        spec = OffloadingSpecFactory.create_spec(
            build_offloading_config(offload_config, kv_cache_config)
        )
        if not isinstance(spec, ReferenceOffloadingSpec):
            raise TypeError(f"spec_name must be ReferenceOffloadingSpec, got {type(spec).__name__}")
        spec.store = store
        self._offload = OffloadingConnectorWorker(spec, offload_config, kv_cache_config)
        self._offload.register_kv_caches(store.indexer_caches())
        self._offload_metadata: Any = None

    @property
    def mirrored_bytes(self) -> int:
        """Bytes of rows copied to the host as they were written."""
        return self._hisparse.mirrored_bytes

    @property
    def spilled_pages(self) -> int:
        """Pages copied to the host because their rows had not been mirrored."""
        return self._hisparse.spilled_pages

    def handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        """By pipeline and tensor rank, as vLLM collects it from its workers."""
        address = self._handoff.get_handshake_metadata() if self._handoff is not None else None
        return [{(0, 0): address}] if address is not None else []

    def before_forward(self, metadata: Any, decoding: Collection[str]) -> HiSparseConnectorMetadata:
        """Preemption flushes, loads and stores due, restores; returns HiSparse's metadata.

        ``decoding``: requests whose rows of this step are of generated tokens.
        """
        hisparse, *handoff, self._offload_metadata = metadata.metadata
        if self._handoff is not None:
            self._handoff.bind_connector_metadata(handoff[0])
            self._handoff.start_load_kv(None)
        self._offload.handle_preemptions(self._offload_metadata)
        self._offload.start_kv_transfers(self._offload_metadata)
        self._hisparse.before_forward(hisparse, decoding)
        return hisparse

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        hisparse = self._hisparse.after_forward()
        self._offload.prepare_store_kv(self._offload_metadata)
        _, loaded = self._offload.get_finished(finished_req_ids)
        parts = [hisparse, self._offload.build_connector_worker_meta()]
        handed = KVConnectorTransferResults()
        if self._handoff is not None:
            handed = self._handoff.get_transfer_results(finished_req_ids)
            parts.insert(1, self._handoff.build_connector_worker_meta())
        known = any(part is not None for part in parts)
        return KVConnectorOutput(
            finished_recving=(loaded | handed.finished_recving) or None,
            failed_recving=handed.failed_recving,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(tuple(parts))
            if known
            else None,
        )

    def shutdown(self) -> None:
        if self._handoff is not None:
            self._handoff.shutdown()
        self._offload.shutdown()
