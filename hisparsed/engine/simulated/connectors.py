"""The worker side of vLLM's KV connectors on the simulated node: who is told what, and when.

vLLM's own offloading worker class over virtual copies; HiSparse's page transfers acknowledged
when their copies have ended. Metadata comes as MultiConnector's tuple.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
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

from hisparsed.engine.simulated.copies import CopyQueue, Link, SimulatedChunkWorker
from hisparsed.plan.layout import Layout


class OffloadingSide:
    """vLLM's offloading worker over virtual copies of ``chunk_bytes`` chunks."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        link: Link,
        chunk_bytes: int,
    ) -> None:
        spec = OffloadingSpecFactory.create_spec(
            build_offloading_config(vllm_config, kv_cache_config)
        )
        self._worker = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)
        self._worker.worker = SimulatedChunkWorker(
            CopyQueue(link.to_gpu), CopyQueue(link.to_host), float(chunk_bytes)
        )
        self._metadata: Any = None

    def before_forward(self, metadata: Any) -> None:
        """Flushes, loads and stores due."""
        self._metadata = metadata
        self._worker.handle_preemptions(metadata)
        self._worker.start_kv_transfers(metadata)

    def after_forward(self, finished_req_ids: set[str]) -> tuple[set[str], Any]:
        """Requests whose prefix has arrived, and what the scheduler is to be told."""
        self._worker.prepare_store_kv(self._metadata)
        _, received = self._worker.get_finished(finished_req_ids)
        return received, self._worker.build_connector_worker_meta()

    def shutdown(self) -> None:
        self._worker.shutdown()


class Connectors(Protocol):
    """What the executor needs of either body."""

    def before_forward(self, metadata: Any) -> None: ...
    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput: ...
    def shutdown(self) -> None: ...


class StandardConnectors:
    """Offloading alone: every chunk is a whole block of KV."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, link: Link, layout: Layout) -> None:
        self._offload = OffloadingSide(
            vllm_config, kv_cache_config, link, layout.baseline_block_bytes
        )

    def before_forward(self, metadata: Any) -> None:
        self._offload.before_forward(metadata)

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        received, told = self._offload.after_forward(finished_req_ids)
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=told)

    def shutdown(self) -> None:
        self._offload.shutdown()


class HiSparseConnectors:
    """HiSparse and offloading of the indexer, on one link.

    The pool on the host is one for all GPUs: the first writes every page whole, each reads it.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, link: Link, layout: Layout) -> None:
        self._to_gpu = CopyQueue(link.to_gpu)
        self._to_host = CopyQueue(link.to_host)
        self._page_bytes = float(layout.host_block_bytes)
        configs = MultiConnector._get_connector_classes_and_configs(vllm_config)
        self._offload = OffloadingSide(configs[1][1], kv_cache_config, link, layout.chunk_bytes)
        self._copied: list[int] = []

    def before_forward(self, metadata: Any) -> None:
        hisparse, offloading = metadata.metadata
        self._offload.before_forward(offloading)
        self._copied.extend(copy.dst_block_id for copy in hisparse.host_block_copies)
        transfers = hisparse.command.page_transfers if hisparse.command is not None else []
        for transfer in transfers:
            queue = self._to_gpu if transfer.restore else self._to_host
            queue.submit(transfer.transfer_id, self._page_bytes)

    def after_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        done = [*self._to_gpu.done(), *self._to_host.done()]
        copied, self._copied = self._copied, []
        hisparse = None
        if done or copied:
            acknowledged = dict.fromkeys(done, 1)
            hisparse = HiSparseConnectorWorkerMetadata(
                acknowledged, dict(acknowledged), tuple(copied)
            )
        received, offload = self._offload.after_forward(finished_req_ids)
        worker_metadata = None
        if hisparse is not None or offload is not None:
            worker_metadata = MultiKVConnectorWorkerMetadata((hisparse, offload))
        return KVConnectorOutput(
            finished_recving=received or None, kv_connector_worker_meta=worker_metadata
        )

    def shutdown(self) -> None:
        self._offload.shutdown()
