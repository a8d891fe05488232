"""The worker side of vLLM's KV connectors on the simulated node, in virtual time.

Each direction of a GPU's link is one queue, as a copy engine is, for all copies. Pages and
chunks have no content; only when they arrive counts. Offloading is vLLM's own worker class over
these copies; HiSparse's page transfers are acknowledged when their copies have ended. Metadata
comes as MultiConnector's tuple.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput

from hisparsed.engine.host.offload import LentOffloadingSpec
from hisparsed.engine.simulated.cost import CostModel, VirtualClock
from hisparsed.plan.layout import Layout


class CopyQueue:
    """The copies of one user of a direction, by that user's numbers."""

    def __init__(self, direction: LinkDirection) -> None:
        self._direction = direction
        self.ended: list[int] = []
        """Numbers of ended copies that were not read yet."""

    def submit(self, number: int, bytes_: float) -> None:
        self._direction.submit(self, number, bytes_)

    def done(self) -> list[int]:
        """Numbers of the copies that have ended since the last call, oldest first."""
        self._direction.settle()
        ended, self.ended = self.ended, []
        return ended

    def wait_for(self, numbers: set[int]) -> None:
        """Let time pass until those copies have ended."""
        self._direction.wait_for(self, numbers)


class LinkDirection:
    """Copies one after another; ``seconds_of`` gives the time of this many bytes."""

    def __init__(self, clock: VirtualClock, seconds_of: Callable[[float], float]) -> None:
        self._clock = clock
        self._seconds_of = seconds_of
        # The link's own clock stops while copies wait for it.
        self._gave_way_s = 0.0
        self._free_at_s = 0.0
        self._waiting: deque[tuple[float, CopyQueue, int]] = deque()
        self.bytes_total = 0.0

    def submit(self, queue: CopyQueue, number: int, bytes_: float) -> None:
        start = max(self._clock.now_s() - self._gave_way_s, self._free_at_s)
        self._free_at_s = start + self._seconds_of(bytes_)
        self._waiting.append((self._free_at_s, queue, number))
        self.bytes_total += bytes_

    def settle(self) -> None:
        """Hand copies that have ended by now to the queues that they are of."""
        while self._waiting and self._at_s(self._waiting[0][0]) <= self._clock.now_s():
            _, queue, number = self._waiting.popleft()
            queue.ended.append(number)

    def give_way(self, seconds: float) -> None:
        """Something else has the link for this long from now: what is in flight ends later."""
        self.settle()
        if self._waiting:
            self._gave_way_s += seconds

    def next_done_s(self) -> float | None:
        """When the next copy ends; ``None`` where none is in flight."""
        return self._at_s(self._waiting[0][0]) if self._waiting else None

    def wait_for(self, queue: CopyQueue, numbers: set[int]) -> None:
        """Let time pass until those copies of ``queue`` have ended."""
        for end_s, of, number in self._waiting:
            if of is queue and number in numbers:
                self._clock.advance_to(self._at_s(end_s))

    def _at_s(self, end_s: float) -> float:
        return end_s + self._gave_way_s


class GpuLink:
    """One GPU's link, of the GPU that writes what all share: no other carries more."""

    def __init__(self, clock: VirtualClock, cost: CostModel) -> None:
        self.to_gpu = LinkDirection(clock, cost.to_gpu_s)
        self.to_host = LinkDirection(clock, cost.to_host_s)

    def next_done_s(self) -> float | None:
        """When the next copy of either direction ends; ``None`` where none is in flight."""
        ends = (self.to_gpu.next_done_s(), self.to_host.next_done_s())
        return min((at_s for at_s in ends if at_s is not None), default=None)

    @property
    def bytes_total(self) -> float:
        """Both directions, since the start."""
        return self.to_gpu.bytes_total + self.to_host.bytes_total


class SimulatedChunkWorker(OffloadingWorker):  # type: ignore[misc]
    """Chunks of indexer KV between the GPU and lent host blocks, in virtual time."""

    def __init__(self, loads: CopyQueue, stores: CopyQueue, chunk_bytes: float) -> None:
        self._loads = loads
        self._stores = stores
        self._chunk_bytes = chunk_bytes
        self._sizes: dict[int, int] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(self._stores, job_id, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """``expedited`` (since vLLM 0.33): the step waits for it. It still queues on its link."""
        return self._submit(self._loads, job_id, src_spec)

    def _submit(self, copies: CopyQueue, job_id: int, host_spec: Any) -> bool:
        size = len(host_spec.block_ids) * self._chunk_bytes
        self._sizes[job_id] = int(size)
        copies.submit(job_id, size)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(job, True, transfer_size=self._sizes.pop(job), transfer_time=1e-9)
            for job in (*self._loads.done(), *self._stores.done())
        ]

    def wait(self, job_ids: set[int]) -> None:
        """vLLM needs these blocks now: the step waits for their copies."""
        self._loads.wait_for(job_ids)
        self._stores.wait_for(job_ids)


class _NoWorker:
    """The executor makes the worker itself."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise RuntimeError("the simulated executor makes its own worker of the offload pool")


class SimulatedOffloadingSpec(_NoWorker, LentOffloadingSpec):
    """Named in ``spec_name``: chunks of indexer KV in lent host blocks."""


class StandardOffloadingSpec(_NoWorker, CPUOffloadingSpec):  # type: ignore[misc]
    """Named in ``spec_name``: chunks of all KV in their own memory, as without HiSparse."""


class OffloadingSide:
    """vLLM's offloading worker over virtual copies of ``chunk_bytes`` chunks."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        link: GpuLink,
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
        """Requests whose prefix has arrived, and what the scheduler has to learn."""
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

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, link: GpuLink, layout: Layout
    ) -> None:
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

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, link: GpuLink, layout: Layout
    ) -> None:
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
