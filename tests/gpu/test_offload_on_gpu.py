"""Chunks of indexer KV between a GPU and lent blocks of a pinned pool: every byte, and how fast.

GLM-5.x shapes: 78 sparse layers, 21 indexer pages in a GPU block of 209,920 bytes, 64 tokens per
block. The pool is pinned by vLLM's own function, in two registrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

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
    require_whole_slices,
)
from hisparsed.engine.cuda.offload import CudaChunkWorker, Lanes
from hisparsed.engine.host.chunks import ChunkLayout

LAYERS, SLICE, PAGES, PAGE, GPU_STRIDE = 78, 64 * 656, 21, 64 * 132, 209_920
LAYOUT = ChunkLayout(LAYERS, SLICE, PAGES * PAGE)
HOST_BLOCKS = 300
GPU_BLOCKS = 3000
GIB = 1 << 30
Record = Callable[[str, object], None]


@dataclass
class Card:
    """One GPU, its slab and a pinned host pool."""

    device: torch.device
    host: torch.Tensor
    slab: torch.Tensor
    slices: HostSlices
    pages: tuple[DeviceRun, ...]
    pin_seconds: float
    calls: CudaCalls

    def worker(self, *, joined: bool = True, others: Callable[[], Any] = tuple) -> CudaChunkWorker:
        runs = join_neighbours(self.pages) if joined else self.pages
        return CudaChunkWorker(
            ChunkRanges(LAYOUT, self.slices, runs, GPU_BLOCKS),
            Lanes(
                store=CudaLane(self.calls, source_is_stable=False, others=others),
                load=CudaLane(self.calls, source_is_stable=True),
                expedited=CudaLane(self.calls, source_is_stable=True),
            ),
            writes=True,
            before_store=lambda: None,
        )

    def content(self) -> torch.Tensor:
        return self.slab.view(GPU_BLOCKS, GPU_STRIDE)[:, : LAYOUT.chunk_bytes]


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    device = torch.device("cuda")
    size = HOST_BLOCKS * LAYOUT.block_bytes
    room = torch.empty(size + 4096, dtype=torch.uint8)
    start = -room.data_ptr() % 4096
    host = room[start : start + size]
    # Four slices end on a page, so this cut is between slices and pages alike.
    cut = 40 * HOST_BLOCKS * SLICE // (4 * SLICE) * (4 * SLICE)
    began = time.perf_counter()
    for part in (host[:cut], host[cut:]):
        pin_tensor(part)
    pin_seconds = time.perf_counter() - began
    address = host.data_ptr()
    slices = HostSlices(
        tuple(address + layer * HOST_BLOCKS * SLICE for layer in range(LAYERS)), SLICE, HOST_BLOCKS
    )
    require_whole_slices(slices, [(address, cut), (address + cut, size - cut)])
    generator = torch.Generator(device).manual_seed(1)
    slab = torch.randint(
        0, 256, (GPU_BLOCKS * GPU_STRIDE,), dtype=torch.uint8, device=device, generator=generator
    )
    pages = tuple(
        DeviceRun(slab.data_ptr() + page * PAGE, GPU_STRIDE, PAGE) for page in range(PAGES)
    )
    yield Card(device, host, slab, slices, pages, pin_seconds, CudaCalls(device))
    torch.cuda.synchronize()
    for part in (host[:cut], host[cut:]):
        torch.cuda.cudart().cudaHostUnregister(part.data_ptr())


def on_gpu(blocks: np.ndarray) -> Any:
    return GPULoadStoreSpec(blocks.tolist(), group_sizes=[len(blocks)], block_indices=[0])


def ended(worker: CudaChunkWorker, job: int) -> Any:
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    return result


def test_every_byte_comes_back_after_random_moves(card: Card) -> None:
    worker = card.worker()
    rng = np.random.default_rng(2)
    count = 600
    before = card.content().cpu()
    for job in range(0, 12, 2):
        chunks = rng.permutation(HOST_BLOCKS * LAYOUT.chunks_per_block)[:count]
        sources, targets = (rng.permutation(GPU_BLOCKS)[:count] for _ in range(2))
        worker.submit_store(job, on_gpu(sources), CPULoadStoreSpec(chunks.tolist()))
        ended(worker, job)
        kept = card.content()[torch.from_numpy(sources).cuda()].cpu()
        card.content()[torch.from_numpy(targets).cuda()] = 0
        torch.cuda.synchronize()
        worker.submit_load(job + 1, CPULoadStoreSpec(chunks.tolist()), on_gpu(targets))
        ended(worker, job + 1)
        before[torch.from_numpy(targets)] = kept
        assert torch.equal(card.content().cpu(), before)
    worker.shutdown()


def test_host_bytes_lie_where_the_layout_puts_them(card: Card) -> None:
    worker = card.worker()
    chunks = np.array([0, 5, 17, 18 * (HOST_BLOCKS - 1) + 9])
    worker.submit_store(1, on_gpu(np.arange(4)), CPULoadStoreSpec(chunks.tolist()))
    ended(worker, 1)
    layers = card.host.view(LAYERS, HOST_BLOCKS, SLICE)
    for index, chunk in enumerate(chunks.tolist()):
        block, slot = LAYOUT.locate(chunk)
        found = torch.cat(
            [
                layers[piece.layer, block, piece.slice_offset :][: piece.length]
                for piece in LAYOUT.pieces(slot)
            ]
        )
        assert torch.equal(found, card.content()[index].cpu())
    worker.shutdown()


def test_a_store_waits_for_what_the_model_still_writes(card: Card) -> None:
    worker = card.worker()
    torch.cuda._sleep(200_000_000)
    card.content()[7] = 41
    worker.submit_store(1, on_gpu(np.array([7])), CPULoadStoreSpec([33]))
    ended(worker, 1)
    worker.submit_load(2, CPULoadStoreSpec([33]), on_gpu(np.array([8])))
    ended(worker, 2)
    assert (card.content()[8] == 41).all()
    worker.shutdown()


def test_a_store_lands_after_what_another_stream_still_writes_to_the_pool(card: Card) -> None:
    mirror = torch.cuda.Stream()
    worker = card.worker(others=lambda: (mirror,))
    late = torch.full((SLICE,), 99, dtype=torch.uint8, device=card.device)
    card.content()[7] = 42
    torch.cuda.synchronize()
    with torch.cuda.stream(mirror):
        torch.cuda._sleep(200_000_000)
        card.host[:SLICE].copy_(late, non_blocking=True)
    worker.submit_store(1, on_gpu(np.array([7])), CPULoadStoreSpec([0]))
    ended(worker, 1)
    assert (card.host[:SLICE] == 42).all()
    worker.shutdown()


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "by_page"])
def test_figures_of_copies(card: Card, joined: bool, record_property: Record) -> None:
    worker = card.worker(joined=joined)
    rng = np.random.default_rng(3)
    chunks = CPULoadStoreSpec(rng.permutation(HOST_BLOCKS * 18)[:GPU_BLOCKS].tolist())
    blocks = on_gpu(rng.permutation(GPU_BLOCKS))
    best = {"store": float("inf"), "load": float("inf")}
    for repeat in range(4):
        worker.submit_store(2 * repeat, blocks, chunks)
        stored = ended(worker, 2 * repeat)
        worker.submit_load(2 * repeat + 1, chunks, blocks)
        loaded = ended(worker, 2 * repeat + 1)
        assert stored.transfer_size == loaded.transfer_size == GPU_BLOCKS * LAYOUT.chunk_bytes
        best["store"] = min(best["store"], stored.transfer_time)
        best["load"] = min(best["load"], loaded.transfer_time)
    name = "joined" if joined else "by_page"
    for direction, seconds in best.items():
        rate = GPU_BLOCKS * LAYOUT.chunk_bytes / seconds / GIB
        assert rate > 0
        record_property(f"offload_{direction}_{name}_gib_per_s", round(rate, 2))
    worker.shutdown()


def test_figures_of_submission(card: Card, record_property: Record) -> None:
    worker = card.worker()
    chunks = CPULoadStoreSpec(list(range(GPU_BLOCKS)))
    blocks = on_gpu(np.arange(GPU_BLOCKS))
    worker.submit_load(0, chunks, blocks)
    ended(worker, 0)
    began = time.perf_counter()
    worker.submit_load(1, chunks, blocks)
    record_property(
        "offload_submit_us_per_chunk",
        round((time.perf_counter() - began) / GPU_BLOCKS * 1e6, 3),
    )
    ended(worker, 1)
    worker.shutdown()


def test_figure_of_pinning(card: Card, record_property: Record) -> None:
    size_gib = card.host.numel() / GIB
    assert card.pin_seconds > 0
    record_property("offload_pool_pin_s_per_gib", round(card.pin_seconds / size_gib, 3))
