"""Copies of indexer chunks as the offload pool makes them: store, load, compare.

The worker, lanes and ranges are those of the node; the pool is a few pinned host blocks and the
slab some GPU blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

from hisparsed.engine.cuda.copies import (
    ChunkRanges,
    CudaCalls,
    CudaLane,
    DeviceRun,
    HostSlices,
    join_neighbours,
)
from hisparsed.engine.cuda.offload import CudaChunkWorker, Lanes
from hisparsed.engine.cuda.proof.addresses import cuda_runtime
from hisparsed.engine.cuda.proof.question import ChunkProof, ChunkSizes
from hisparsed.engine.host.chunks import ChunkLayout

HOST_BLOCKS = 8
ROUNDS = 4
_PAGE = 4096
_GIB = 2**30
_SEED = 21


def prove_chunks(sizes: ChunkSizes, device: torch.device) -> ChunkProof:
    """Raises whatever the device or vLLM raises."""
    layout = ChunkLayout(sizes.layers, sizes.slice_bytes, sizes.pages * sizes.page_bytes)
    host = _pinned(layout.block_bytes * HOST_BLOCKS)
    try:
        return _prove(layout, sizes, host, device)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            cuda_runtime().cudaHostUnregister(host.data_ptr())


def _pinned(size: int) -> torch.Tensor:
    room = torch.empty(size + 2 * _PAGE, dtype=torch.uint8)
    whole = room[-room.data_ptr() % _PAGE :][: -(-size // _PAGE) * _PAGE]
    pin_tensor(whole)
    return whole


def _prove(
    layout: ChunkLayout, sizes: ChunkSizes, host: torch.Tensor, device: torch.device
) -> ChunkProof:
    chunks = HOST_BLOCKS * layout.chunks_per_block
    blocks = 2 * chunks
    # A gap behind the pages of a block: neighbours must not be written.
    stride = layout.chunk_bytes + sizes.page_bytes
    generator = torch.Generator(device).manual_seed(_SEED)
    slab = torch.randint(
        0, 256, (blocks, stride), dtype=torch.uint8, device=device, generator=generator
    )
    worker = _worker(layout, sizes, host, slab, device)
    order = torch.Generator().manual_seed(_SEED)
    stored_s = loaded_s = 0.0
    for number in range(ROUNDS):
        ids = torch.randperm(chunks, generator=order)
        places = torch.randperm(blocks, generator=order)
        source, target = places[:chunks], places[chunks:]
        right = slab.clone()
        right[target.to(device), : layout.chunk_bytes] = slab[
            source.to(device), : layout.chunk_bytes
        ]
        stored_s += _ended(worker, 2 * number, "store", source, ids)
        difference = _host_difference(layout, sizes, host, slab, source, ids)
        if difference is not None:
            return ChunkProof(difference=difference)
        slab[target.to(device), : layout.chunk_bytes] = 0
        loaded_s += _ended(worker, 2 * number + 1, "load", target, ids)
        wrong = (slab != right).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            return ChunkProof(
                difference=f"GPU block {wrong[0]}, and {len(wrong) - 1} more, have other bytes "
                "after a load than were stored"
            )
    worker.shutdown()
    moved = ROUNDS * chunks * layout.chunk_bytes / _GIB
    return ChunkProof(
        chunks=ROUNDS * chunks,
        store_gib_per_s=moved / stored_s if stored_s else 0.0,
        load_gib_per_s=moved / loaded_s if loaded_s else 0.0,
    )


def _worker(
    layout: ChunkLayout,
    sizes: ChunkSizes,
    host: torch.Tensor,
    slab: torch.Tensor,
    device: torch.device,
) -> CudaChunkWorker:
    layer_bytes = HOST_BLOCKS * sizes.slice_bytes
    slices = HostSlices(
        tuple(host.data_ptr() + layer * layer_bytes for layer in range(sizes.layers)),
        sizes.slice_bytes,
        HOST_BLOCKS,
    )
    pages = tuple(
        DeviceRun(slab.data_ptr() + page * sizes.page_bytes, slab.stride(0), sizes.page_bytes)
        for page in range(sizes.pages)
    )
    calls = CudaCalls(device)
    return CudaChunkWorker(
        ChunkRanges(layout, slices, join_neighbours(pages), slab.shape[0]),
        Lanes(
            store=CudaLane(calls, source_is_stable=False),
            load=CudaLane(calls, source_is_stable=True),
            expedited=CudaLane(calls, source_is_stable=True),
        ),
        writes=True,
        before_store=lambda: None,
    )


def _ended(
    worker: CudaChunkWorker, job: int, kind: str, blocks: torch.Tensor, chunks: torch.Tensor
) -> float:
    """Do it and wait; seconds on the device."""
    pages: Any = GPULoadStoreSpec(blocks.tolist(), group_sizes=[len(blocks)], block_indices=[0])
    kept: Any = CPULoadStoreSpec(chunks.tolist())
    if kind == "store":
        worker.submit_store(job, pages, kept)
    else:
        worker.submit_load(job, kept, pages)
    worker.wait({job})
    (result,) = worker.get_finished()
    return float(result.transfer_time)


def _host_difference(
    layout: ChunkLayout,
    sizes: ChunkSizes,
    host: torch.Tensor,
    slab: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
) -> str | None:
    """The first chunk that does not lie where the layout says."""
    pool = host[: layout.block_bytes * HOST_BLOCKS]
    layers = pool.view(sizes.layers, HOST_BLOCKS, sizes.slice_bytes)
    content = slab[:, : layout.chunk_bytes].cpu()
    for block, chunk in zip(source.tolist(), ids.tolist(), strict=True):
        host_block, slot = layout.locate(chunk)
        for piece in layout.pieces(slot):
            found = layers[piece.layer, host_block, piece.slice_offset :][: piece.length]
            right = content[block, piece.chunk_offset :][: piece.length]
            if not torch.equal(found, right):
                return f"chunk {chunk}: its bytes in layer {piece.layer} are not those stored"
    return None
