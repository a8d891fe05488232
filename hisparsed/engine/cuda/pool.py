"""The pinned HiSparse pool as vLLM's HiSparse worker holds it, found in a running GPU worker.

Reads vLLM's objects and keeps addresses only: a tensor of ours would keep the shared mapping
open at shutdown. Allocates, maps and pins nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnector
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)

from hisparsed.engine.compat.pending_writes import pending_writes
from hisparsed.engine.cuda.ranges import HostSlices


@dataclass(frozen=True)
class HiSparsePool:
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
        "offload pool: lent blocks are HiSparse's, but no HiSparseConnector is configured beside "
        "the OffloadingConnector"
    )


def pool_of(worker: Any) -> HiSparsePool:
    """The pool of an initialised HiSparse worker. Raises ``ValueError`` on a layout in which
    host blocks have no equal slices a layer."""
    region = worker.shared_host_region
    return HiSparsePool(
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
