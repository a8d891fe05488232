"""The worker side of vLLM's KV connectors on the reference node, in step order.

HiSparse: host block copies, page transfers (also restores after an import) and row mirrors,
acknowledged after a configurable number of steps, as a DMA engine would. Offloading: vLLM's
own worker class over ``LentChunkWorker``. Metadata comes as MultiConnector's tuple.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorMetadata,
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput

from hisparsed.engine.reference.offload import ReferenceOffloadingSpec
from hisparsed.engine.reference.store import KVStore


class HiSparseTransfers:
    """Page transfers in flight. A copy is made when it is acknowledged, which is the
    latest moment vLLM allows: a page handed out too early would show."""

    def __init__(self, store: KVStore, ack_lag_steps: int) -> None:
        self._store = store
        self._lag = ack_lag_steps
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._step = 0
        self._copied: list[int] = []
        self._mirrors: list[Any] = []
        self._restored: list[int] = []
        self.mirrored_bytes = 0

    def before_forward(self, metadata: HiSparseConnectorMetadata) -> None:
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
        self._mirrors = [mirror for mirrors in metadata.row_mirrors.values() for mirror in mirrors]

    def after_forward(self) -> HiSparseConnectorWorkerMetadata | None:
        self.mirrored_bytes += self._store.mirror_rows(self._mirrors)
        self._mirrors = []
        done, self._restored = self._restored, []
        while self._in_flight and self._in_flight[0][0] <= self._step:
            _, transfer = self._in_flight.popleft()
            self._store.copy_page(
                transfer.host_block_id, transfer.resident_block_ids, restore=False
            )
            done.append(transfer.transfer_id)
        copied, self._copied = self._copied, []
        if not done and not copied:
            return None
        acknowledged = dict.fromkeys(done, 1)
        return HiSparseConnectorWorkerMetadata(acknowledged, dict(acknowledged), tuple(copied))


class ReferenceConnectors:
    """HiSparse and offloading workers behind one call before and one after the forward."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, store: KVStore, lag: int) -> None:
        self._hisparse = HiSparseTransfers(store, lag)
        configs = MultiConnector._get_connector_classes_and_configs(vllm_config)
        names = [connector.__name__ for connector, _ in configs]
        if names != ["HiSparseConnector", "OffloadingConnector"]:
            raise ValueError(
                "the reference node needs MultiConnector(HiSparseConnector, "
                f"OffloadingConnector), got {names}"
            )
        offload_config = configs[1][1]
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
        return self._hisparse.mirrored_bytes

    def before_forward(self, metadata: Any) -> HiSparseConnectorMetadata:
        """Preemption flushes, loads and stores due, restores; returns HiSparse's metadata."""
        hisparse, self._offload_metadata = metadata.metadata
        self._offload.handle_preemptions(self._offload_metadata)
        self._offload.start_kv_transfers(self._offload_metadata)
        self._hisparse.before_forward(hisparse)
        return hisparse

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        hisparse = self._hisparse.after_forward()
        self._offload.prepare_store_kv(self._offload_metadata)
        _, finished_recving = self._offload.get_finished(finished_req_ids)
        offload = self._offload.build_connector_worker_meta()
        worker_metadata = None
        if hisparse is not None or offload is not None:
            worker_metadata = MultiKVConnectorWorkerMetadata((hisparse, offload))
        return KVConnectorOutput(
            finished_recving=finished_recving or None, kv_connector_worker_meta=worker_metadata
        )

    def shutdown(self) -> None:
        self._offload.shutdown()
