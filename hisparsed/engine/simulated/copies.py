"""Bulk copies in flight on the simulated node: queued on a link, done at a virtual time.

Each direction of a GPU's link is one queue, as a copy engine is, whoever copies. Pages and
chunks have no content here; only when they arrive counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hisparsed.engine.offload import LentOffloadingSpec
from hisparsed.engine.simulated.clock import VirtualClock
from hisparsed.engine.simulated.cost import CostModel


class LinkDirection:
    """Copies one after another; ``seconds_of`` gives the time of so many bytes."""

    def __init__(self, clock: VirtualClock, seconds_of: Callable[[float], float]) -> None:
        self._clock = clock
        self._seconds_of = seconds_of
        # The link's own time stands still while copies give way.
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
        """Something else has the link for so long from now: what is in flight ends later."""
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


class CopyQueue:
    """The copies of one user of a direction, by numbers of its own."""

    def __init__(self, direction: LinkDirection) -> None:
        self._direction = direction
        self.ended: list[int] = []
        """Numbers of ended copies that nobody has asked for yet."""

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


class Link:
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
    """Named in ``spec_name``: chunks of all KV in memory of their own, as without HiSparse."""
