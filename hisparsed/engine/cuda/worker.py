"""The worker half of the offload pool on the CUDA node: jobs in, copies out, results back.

One a rank. Where all ranks map one host pool, the rank that writes it for HiSparse stores and
every other acknowledges; all ranks load. vLLM counts acknowledgements: a chunk can be loaded
once every rank has reported its store, so no rank reads before the writer's copy has ended.
Allocates and pins nothing. A job that cannot be copied raises: vLLM has no failed jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from hisparsed.engine.cuda.copy import Copy, Lane
from hisparsed.engine.cuda.ranges import ByteRanges, ChunkRanges


@dataclass(frozen=True)
class Lanes:
    """``expedited`` is for loads that a step waits for: they pass the others."""

    store: Lane
    load: Lane
    expedited: Lane


@dataclass(frozen=True)
class _Job:
    job_id: int
    size: int
    copy: Copy


class CudaChunkWorker(OffloadingWorker):  # type: ignore[misc]
    """``writes``: whether this rank stores. ``before_store``: called before each copy into the
    host pool, so that writes of a block's tenant before are on their stream already."""

    def __init__(
        self,
        ranges: ChunkRanges,
        lanes: Lanes,
        *,
        writes: bool,
        before_store: Callable[[], None],
    ) -> None:
        self._ranges = ranges
        self._lanes: Lanes | None = lanes
        self._writes = writes
        self._before_store = before_store
        self._stores: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._expedited: deque[_Job] = deque()
        self._acknowledged: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        lanes = self._open_lanes(job_id)
        ranges = self._ranges_of(job_id, chunks=dst_spec, pages=src_spec)
        if not self._writes:
            self._acknowledged.append(job_id)
            return True
        self._before_store()
        copy = lanes.store.submit(ranges.device, ranges.host, ranges.lengths)
        self._stores.append(_Job(job_id, ranges.total_bytes, copy))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        lanes = self._open_lanes(job_id)
        ranges = self._ranges_of(job_id, chunks=src_spec, pages=dst_spec)
        lane, jobs = (lanes.expedited, self._expedited) if expedited else (lanes.load, self._loads)
        copy = lane.submit(ranges.host, ranges.device, ranges.lengths)
        jobs.append(_Job(job_id, ranges.total_bytes, copy))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Each job once. A job that this rank did not copy has no size: vLLM counts bytes once."""
        results = [TransferResult(job_id, True) for job_id in self._acknowledged]
        self._acknowledged = []
        for jobs in (self._stores, self._loads, self._expedited):
            while jobs and jobs[0].copy.done():
                job = jobs.popleft()
                results.append(
                    TransferResult(
                        job.job_id,
                        True,
                        transfer_size=job.size,
                        transfer_time=job.copy.seconds(),
                    )
                )
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job in self._under_way():
            if job.job_id in job_ids:
                job.copy.wait()

    def shutdown(self) -> None:
        """Let what is under way end. HiSparse's own shutdown comes first and unpins the pool,
        but waits for the device before it does."""
        self._lanes = None
        for job in self._under_way():
            job.copy.wait()
        for jobs in (self._stores, self._loads, self._expedited):
            jobs.clear()
        self._acknowledged = []

    def _under_way(self) -> list[_Job]:
        return list(chain(self._stores, self._loads, self._expedited))

    def _open_lanes(self, job_id: int) -> Lanes:
        if self._lanes is None:
            raise RuntimeError(f"offload job {job_id}: this worker has been shut down")
        return self._lanes

    def _ranges_of(self, job_id: int, *, chunks: Any, pages: Any) -> ByteRanges:
        try:
            return self._ranges.of(chunks.block_ids, pages.block_ids)
        except ValueError as error:
            raise ValueError(f"offload job {job_id}: {error}") from error
