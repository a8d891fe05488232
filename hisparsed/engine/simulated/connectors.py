"""The worker side of vLLM's KV connectors on the simulated node: who is told what, and when.

vLLM's own offloading worker class over virtual copies; HiSparse's page transfers acknowledged
when their copies have ended. Metadata comes as MultiConnector's tuple.
"""

from __future__ import annotations

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

from hisparsed.engine.simulated.clock import VirtualClock
from hisparsed.engine.simulated.copies import CopyQueue, SimulatedChunkWorker
from hisparsed.engine.simulated.cost import CostModel
from hisparsed.plan.layout import Layout


class SimulatedConnectors:
    """``layout`` gives bytes of pages and chunks on each GPU's link."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        clock: VirtualClock,
        cost: CostModel,
        layout: Layout,
        gpus: int,
    ) -> None:
        self.to_gpu = CopyQueue(clock, cost.copy_s)
        self.to_host = CopyQueue(clock, cost.copy_s)
        self.chunk_loads = CopyQueue(clock, cost.copy_s)
        self.chunk_stores = CopyQueue(clock, cost.copy_s)
        self._page_bytes = float(layout.host_block_bytes)
        self._gpus = gpus
        configs = MultiConnector._get_connector_classes_and_configs(vllm_config)
        offload_config = configs[1][1]
        spec = OffloadingSpecFactory.create_spec(
            build_offloading_config(offload_config, kv_cache_config)
        )
        self._offload = OffloadingConnectorWorker(spec, offload_config, kv_cache_config)
        self._offload.worker = SimulatedChunkWorker(
            self.chunk_loads,
            self.chunk_stores,
            float(layout.chunk_bytes),
        )
        self._metadata: Any = None
        self._copied: list[int] = []

    def before_forward(self, metadata: Any) -> HiSparseConnectorMetadata:
        """Flushes, loads, stores and page transfers due; returns HiSparse's metadata."""
        hisparse, self._metadata = metadata.metadata
        self._offload.handle_preemptions(self._metadata)
        self._offload.start_kv_transfers(self._metadata)
        self._copied.extend(copy.dst_block_id for copy in hisparse.host_block_copies)
        transfers = hisparse.command.page_transfers if hisparse.command is not None else []
        for transfer in transfers:
            if transfer.restore:
                self.to_gpu.submit(transfer.transfer_id, self._page_bytes)
            else:
                # One host copy for all GPUs, so each writes its part.
                self.to_host.submit(transfer.transfer_id, self._page_bytes / self._gpus)
        return hisparse

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """What has ended by now."""
        done = [*self.to_gpu.done(), *self.to_host.done()]
        copied, self._copied = self._copied, []
        hisparse = None
        if done or copied:
            acknowledged = dict.fromkeys(done, 1)
            hisparse = HiSparseConnectorWorkerMetadata(
                acknowledged, dict(acknowledged), tuple(copied)
            )
        self._offload.prepare_store_kv(self._metadata)
        _, received = self._offload.get_finished(finished_req_ids)
        offload = self._offload.build_connector_worker_meta()
        worker_metadata = None
        if hisparse is not None or offload is not None:
            worker_metadata = MultiKVConnectorWorkerMetadata((hisparse, offload))
        return KVConnectorOutput(
            finished_recving=received or None, kv_connector_worker_meta=worker_metadata
        )

    def next_done_s(self) -> float | None:
        """When the next copy in flight ends."""
        queues = (self.to_gpu, self.to_host, self.chunk_loads, self.chunk_stores)
        return min((at for queue in queues if (at := queue.next_done_s()) is not None), default=None)

    def copied_bytes(self) -> float:
        """Bytes over one GPU's link so far, row reads left out."""
        queues = (self.to_gpu, self.to_host, self.chunk_loads, self.chunk_stores)
        return sum(queue.bytes_total for queue in queues)

    def shutdown(self) -> None:
        self._offload.shutdown()
