"""The CUDA worker's address arithmetic puts every byte where the reference node puts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_copies import SlowLane, Stream, one_stream_lane

from hisparsed.engine.cuda.ranges import ChunkRanges, DeviceRun, HostSlices, join_neighbours
from hisparsed.engine.cuda.worker import CudaChunkWorker, Lanes


class Memory:
    """Host pool and GPU slab of one node, in the reference node's shape.

    The slab's blocks hold the indexer pages behind ``gap`` other bytes, with ``between`` bytes
    from one page to the next.
    """

    def __init__(
        self, seed: int, *, layers: int, groups: int, block: int, gap: int, between: int
    ) -> None:
        from hisparsed.engine.reference.geometry import INDEX_ROW_BYTES, ROW_BYTES
        from hisparsed.engine.reference.offload import reference_chunk_layout

        self.host_blocks, self.num_blocks = 4, 6
        page = block * INDEX_ROW_BYTES
        stride = gap + groups * (page + between)
        fill = np.random.default_rng(seed)
        self.host = torch.from_numpy(
            fill.integers(-128, 127, layers * self.host_blocks * block * ROW_BYTES, dtype=np.int8)
        )
        self.slab = torch.from_numpy(
            fill.integers(-128, 127, self.num_blocks * stride, dtype=np.int8)
        )
        host_rows = list(self.host.view(layers, self.host_blocks * block, ROW_BYTES))
        index_rows = [
            torch.as_strided(
                self.slab,
                (self.num_blocks, block, INDEX_ROW_BYTES),
                (stride, INDEX_ROW_BYTES, 1),
                gap + group * (page + between),
            )
            for group in range(groups)
        ]
        self.store: Any = SimpleNamespace(
            host_blocks=self.host_blocks,
            block_size=block,
            host_rows=host_rows,
            index_rows=index_rows,
            geometry=SimpleNamespace(layers=layers, index_groups=groups),
        )
        self.layout = reference_chunk_layout(self.store)
        self.slices = HostSlices(
            tuple(rows.data_ptr() for rows in host_rows), block * ROW_BYTES, self.host_blocks
        )
        self.runs = join_neighbours(DeviceRun(view.data_ptr(), stride, page) for view in index_rows)

    def reference_worker(self) -> Any:
        from hisparsed.engine.reference.offload import LentChunkWorker

        return LentChunkWorker(self.store, self.layout)

    def cuda_worker(self) -> CudaChunkWorker:
        return CudaChunkWorker(
            ChunkRanges(self.layout, self.slices, self.runs, self.num_blocks),
            Lanes(SlowLane(Stream()), one_stream_lane(), one_stream_lane()),
            writes=True,
            before_store=lambda: None,
        )


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_random_stores_and_loads_leave_equal_memory(data: st.DataObject, seed: int) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    groups = data.draw(st.integers(1, 4))
    shape = {
        "layers": groups * data.draw(st.integers(1, 4)),
        "groups": groups,
        "block": data.draw(st.sampled_from([1, 2, 16])),
        "gap": data.draw(st.integers(0, 40)),
        "between": data.draw(st.sampled_from([0, 0, 12])),
    }
    ours, reference = Memory(seed, **shape), Memory(seed, **shape)
    workers: list[Any] = [ours.cuda_worker(), reference.reference_worker()]
    chunk_count = ours.host_blocks * ours.layout.chunks_per_block
    for job in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, min(4, chunk_count)))
        pick = st.integers(0, chunk_count - 1)
        chunks = data.draw(st.lists(pick, min_size=count, max_size=count, unique=True))
        block_ids = st.permutations(range(ours.num_blocks))
        blocks = data.draw(block_ids)[:count]
        on_host = CPULoadStoreSpec(chunks)
        on_gpu = GPULoadStoreSpec(blocks, group_sizes=[count], block_indices=[0])
        load = data.draw(st.booleans())
        for worker in workers:
            if load:
                worker.submit_load(job, on_host, on_gpu)
            else:
                worker.submit_store(job, on_gpu, on_host)
            worker.wait({job})
            (result,) = worker.get_finished()
            assert result.transfer_size == count * ours.layout.chunk_bytes
        assert torch.equal(ours.host, reference.host)
        assert torch.equal(ours.slab, reference.slab)
