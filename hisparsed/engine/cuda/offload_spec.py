"""The offload pool's spec on the CUDA node: lent chunks in the pinned HiSparse pool.

Named in ``spec_name``; vLLM builds one in the scheduler and one in every GPU worker. The
scheduler's manager is that of every node; the worker finds the pool that HiSparse has pinned.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

from hisparsed.control.log_table import OFFLOAD_LAYOUT
from hisparsed.engine.cache_groups import chunk_layout
from hisparsed.engine.chunks import ChunkLayout
from hisparsed.engine.cuda.copy import CudaCalls, CudaLane
from hisparsed.engine.cuda.pool import HiSparsePool, hisparse_worker, pool_of
from hisparsed.engine.cuda.ranges import (
    ChunkRanges,
    DeviceRun,
    join_neighbours,
    require_whole_slices,
)
from hisparsed.engine.cuda.worker import CudaChunkWorker, Lanes
from hisparsed.engine.offload import LentOffloadingSpec

logger = logging.getLogger(__name__)


class CudaOffloadingSpec(LentOffloadingSpec):
    """Who writes is decided in the worker, where it is known whether the ranks share a pool."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.extra_config.get("canonical_layout"):
            raise ValueError(
                "kv_connector_extra_config.canonical_layout: lent blocks have a layout of their "
                "own; leave it out"
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
            words = describe(pool, runs, self.config.parallel.world_size)
            logger.info("%s", words, extra={"event_id": OFFLOAD_LAYOUT})
        return self._chunk_worker


def scheduler_layout(kv_cache_config: Any) -> ChunkLayout:
    """The chunk layout as the scheduler's ledger computes it."""
    groups = kv_cache_config.kv_cache_groups
    source = next(index for index, group in enumerate(groups) if group.host_resident)
    return chunk_layout(kv_cache_config, source)


def chunk_ranges(
    layout: ChunkLayout, pool: HiSparsePool, runs: tuple[DeviceRun, ...], device_blocks: int
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


def describe(pool: HiSparsePool, runs: tuple[DeviceRun, ...], world_size: int) -> str:
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
