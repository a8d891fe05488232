"""The offload pool on the CUDA node: lent chunks in the pinned HiSparse pool.

``CudaOffloadingSpec`` is named in ``spec_name``; vLLM builds one in the scheduler and one in every
GPU worker. The scheduler's manager is that of every node. The worker finds the pool that vLLM's
HiSparse worker has pinned, and keeps addresses only: a tensor here would keep the shared mapping
open at shutdown. Nothing here allocates, maps or pins memory.

There is one ``CudaChunkWorker`` per rank. Where all ranks map one pool, the rank that writes it for
HiSparse stores and every other acknowledges; all ranks load. vLLM counts acknowledgements: a chunk
can be loaded once every rank has reported its store, so no rank reads before the writer's copy has
ended. A job that cannot be copied raises: vLLM has no failed jobs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnector
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult

from hisparsed.engine.compat.adapters import pending_writes
from hisparsed.engine.cuda.copies import (
    ByteRanges,
    ChunkRanges,
    Copy,
    CudaCalls,
    CudaLane,
    DeviceRun,
    HostSlices,
    Lane,
    join_neighbours,
    require_whole_slices,
)
from hisparsed.engine.host.chunks import ChunkLayout, chunk_layout
from hisparsed.engine.host.offload import LentOffloadingSpec
from hisparsed.logs.event_ids import OFFLOAD_LAYOUT


@dataclass(frozen=True)
class PinnedPool:
    """``registrations``: (address, bytes) of pinned ranges. ``shared``: all ranks map one pool;
    else each has its own, with a copy of every chunk. ``writes``: this rank fills it."""

    slices: HostSlices
    registrations: tuple[tuple[int, int], ...]
    shared: bool
    writes: bool
    enqueue_pending_writes: Callable[[], None]
    """Hand HiSparse's writes of the step before to their stream, where they still wait."""
    write_streams: Callable[[], Sequence[Any]]
    """The streams on which this rank writes the pool."""


def hisparse_worker() -> Any:
    """vLLM's HiSparse worker object of this process. Raises ``RuntimeError`` where it is not
    there or has no pool yet."""
    if not has_kv_transfer_group():
        raise RuntimeError("offload pool: this process has no KV connector")
    connector = get_kv_transfer_group()
    for child in getattr(connector, "sub_connectors", [connector]):
        if isinstance(child, HiSparseConnector) and child.connector_worker is not None:
            worker = child.connector_worker
            if getattr(worker, "host_caches", None) is None:
                raise RuntimeError(
                    "offload pool: HiSparse has no host pool yet; list HiSparseConnector before "
                    "OffloadingConnector in the connectors of MultiConnector"
                )
            return worker
    raise RuntimeError(
        "offload pool: lent blocks are HiSparse's, but no HiSparseConnector is configured next to "
        "the OffloadingConnector"
    )


def pool_of(worker: Any) -> PinnedPool:
    """The pool of an initialised HiSparse worker. Raises ``ValueError`` on a layout in which
    host blocks have no equal slices a layer."""
    region = worker.shared_host_region
    return PinnedPool(
        slices=_slices(worker),
        registrations=_registrations(region, worker.pinned_host_pools),
        shared=region is not None,
        writes=bool(worker.is_host_writer),
        enqueue_pending_writes=pending_writes(worker),
        write_streams=lambda: () if worker.dma_stream is None else (worker.dma_stream,),
    )


def _slices(worker: Any) -> HostSlices:
    block_rows, blocks = int(worker.kernel_block_size), int(worker.host_num_blocks)
    slice_bytes: set[int] = set()
    for layer, cache in enumerate(worker.host_caches):
        row_bytes = cache.shape[1] * cache.element_size()
        if not cache.is_contiguous() or cache.shape[0] != blocks * block_rows:
            raise ValueError(
                f"host pool: layer {layer} has {cache.shape[0]} rows; {blocks} blocks of "
                f"{block_rows} rows, one behind the other, are needed"
            )
        slice_bytes.add(block_rows * row_bytes)
    if len(slice_bytes) != 1:
        raise ValueError(
            f"host pool: layers have slices of {sorted(slice_bytes)} B; chunks need one size"
        )
    addresses = tuple(int(cache.data_ptr()) for cache in worker.host_caches)
    return HostSlices(addresses, slice_bytes.pop(), blocks)


def _registrations(region: Any, private_pools: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    if region is None:
        return tuple((int(pool.data_ptr()), int(pool.nbytes)) for pool in private_pools)
    # vLLM keeps where each registration starts; they follow each other to the region's end.
    starts = sorted(int(address) for address in region.pinned_addresses)
    end = int(region.base_tensor.data_ptr()) + int(region.base_tensor.nbytes)
    stops = [*starts[1:], end][: len(starts)]
    return tuple((start, stop - start) for start, stop in zip(starts, stops, strict=True))


@dataclass(frozen=True)
class Lanes:
    """``expedited`` is for loads that a step waits for: they pass the others."""

    store: Lane
    load: Lane
    expedited: Lane


@dataclass(frozen=True)
class _Job:
    """``size``: bytes, of the rank that vLLM's metrics count."""

    job_id: int
    size: int | None
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
        # Ranks of one pool load the same chunk each; vLLM adds up their reports.
        jobs.append(_Job(job_id, ranges.total_bytes if self._writes else None, copy))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Each job once. Only the rank that writes the pool gives sizes: vLLM counts bytes once."""
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


logger = logging.getLogger(__name__)


class CudaOffloadingSpec(LentOffloadingSpec):
    """The writer is chosen in the worker, where it is known whether the ranks share a pool."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.extra_config.get("canonical_layout"):
            raise ValueError(
                "kv_connector_extra_config.canonical_layout: lent blocks have their own layout; "
                "remove it"
            )
        # vLLM would keep stores from all ranks but the first, also where each has its own pool.
        self.replicated_layout = False
        self._chunk_worker: CudaChunkWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Raises ``RuntimeError`` without a HiSparse pool, ``ValueError`` on sizes that differ
        from the scheduler's."""
        if self._chunk_worker is None:
            hisparse = hisparse_worker()
            pool = pool_of(hisparse)
            runs, device_blocks = device_runs(kv_caches)
            ranges = chunk_ranges(
                scheduler_layout(hisparse.kv_cache_config), pool, runs, device_blocks
            )
            calls = CudaCalls(kv_caches.tensors[0].tensor.device)
            self._chunk_worker = CudaChunkWorker(
                ranges,
                Lanes(
                    store=CudaLane(calls, source_is_stable=False, others=pool.write_streams),
                    load=CudaLane(calls, source_is_stable=True),
                    expedited=CudaLane(calls, source_is_stable=True),
                ),
                writes=pool.writes,
                before_store=pool.enqueue_pending_writes,
            )
            words = describe_pool(pool, runs, self.config.parallel.world_size)
            logger.info("%s", words, extra={"event_id": OFFLOAD_LAYOUT})
        return self._chunk_worker


def scheduler_layout(kv_cache_config: Any) -> ChunkLayout:
    """The chunk layout as the scheduler's ledger computes it."""
    groups = kv_cache_config.kv_cache_groups
    source = next(index for index, group in enumerate(groups) if group.host_resident)
    return chunk_layout(kv_cache_config, source)


def chunk_ranges(
    layout: ChunkLayout, pool: PinnedPool, runs: tuple[DeviceRun, ...], device_blocks: int
) -> ChunkRanges:
    """Addresses of this rank, once registrations are known to cut no slice."""
    require_whole_slices(pool.slices, pool.registrations)
    return ChunkRanges(layout, pool.slices, runs, device_blocks)


def device_runs(kv_caches: CanonicalKVCaches) -> tuple[tuple[DeviceRun, ...], int]:
    """The indexer pages of a GPU block in chunk order, neighbours joined; number of blocks."""
    if len(kv_caches.group_data_refs) != 1:
        raise ValueError(
            f"{len(kv_caches.group_data_refs)} cache groups are offloaded; with HiSparse it is "
            "the indexer group alone"
        )
    runs, blocks = [], set()
    for ref in kv_caches.group_data_refs[0]:
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        stride = tensor.stride(0) * tensor.element_size()
        runs.append(DeviceRun(tensor.data_ptr(), stride, ref.page_size_bytes))
        blocks.add(tensor.shape[0])
    if len(blocks) != 1:
        raise ValueError(f"indexer layers have {sorted(blocks)} GPU blocks; all need as many")
    return join_neighbours(runs), blocks.pop()


def describe_pool(pool: PinnedPool, runs: tuple[DeviceRun, ...], world_size: int) -> str:
    """One line for the log: whose pool, who writes, how chunks are cut."""
    if pool.shared:
        kept = f"one pool and one copy for {world_size} ranks, " + (
            "written by this one" if pool.writes else "written by another"
        )
    elif world_size > 1:
        kept = f"{world_size} ranks with a pool and a copy each: the node pins it {world_size}x"
    else:
        kept = "one rank, one pool"
    return (
        f"offload pool: {kept}; {pool.slices.blocks} host blocks of {len(pool.slices.addresses)} "
        f"slices in {len(pool.registrations)} registrations; a GPU block's indexer pages are "
        f"{len(runs)} runs"
    )
