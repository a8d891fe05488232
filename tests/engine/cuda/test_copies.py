"""Chunk ids to byte ranges, and the calls that a lane makes to CUDA for them.

Every byte is copied once, cut at slices and runs, in one registration each, to the place where the
reference node puts it. A device is not needed to see the calls and their order.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import SlowLane, Stream, one_stream_lane

from hisparsed.engine.cuda.copies import (
    ChunkRanges,
    CudaCopy,
    CudaLane,
    DeviceRun,
    HostSlices,
    join_neighbours,
    require_whole_slices,
)
from hisparsed.engine.cuda.offload import CudaChunkWorker, Lanes
from hisparsed.engine.host.chunks import ChunkLayout
from tests.examples import examples


@dataclass(frozen=True)
class Node:
    layout: ChunkLayout
    host: HostSlices
    pages: tuple[DeviceRun, ...]
    device_blocks: int

    def ranges(self) -> ChunkRanges:
        return ChunkRanges(self.layout, self.host, join_neighbours(self.pages), self.device_blocks)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Layers anywhere in host memory; pages neighbours or not, GPU block and host block of
    unrelated sizes."""
    layers, slice_bytes = draw(st.integers(1, 12)), draw(st.integers(1, 300))
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=8))
    chunk_bytes = sum(sizes)
    if chunk_bytes > layers * slice_bytes:
        slice_bytes = -(-chunk_bytes // layers)
    layout = ChunkLayout(layers, slice_bytes, chunk_bytes)
    blocks = draw(st.integers(1, 9))
    addresses, address = [], 1 << 44
    for gap in draw(st.lists(st.integers(0, 500), min_size=layers, max_size=layers)):
        addresses.append(address + gap)
        address += gap + slice_bytes * blocks
    gaps = draw(st.lists(st.sampled_from([0, 0, 7]), min_size=len(sizes), max_size=len(sizes)))
    stride = chunk_bytes + sum(gaps) + draw(st.integers(0, 50))
    pages, offset = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        pages.append(DeviceRun((1 << 46) + offset, stride, size))
        offset += size + gap
    host = HostSlices(tuple(addresses), slice_bytes, blocks)
    return Node(layout, host, tuple(pages), draw(st.integers(1, 20)))


@st.composite
def nodes_and_chunks(draw: st.DrawFn) -> tuple[Node, list[int], list[int]]:
    node = draw(nodes())
    chunks = node.host.blocks * node.layout.chunks_per_block
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, chunks - 1), st.integers(0, node.device_blocks - 1)),
            max_size=6,
        )
    )
    return node, [chunk for chunk, _ in pairs], [block for _, block in pairs]


def by_the_layout(node: Node, chunk: int, device_block: int) -> list[tuple[int, int]]:
    """(GPU address, host address) of every byte of a chunk, from pages and pieces alone."""
    device = [
        page.address + device_block * page.block_stride + byte
        for page in node.pages
        for byte in range(page.length)
    ]
    block, slot = node.layout.locate(chunk)
    host = [
        node.host.addresses[piece.layer] + block * node.host.slice_bytes + piece.slice_offset + byte
        for piece in node.layout.pieces(slot)
        for byte in range(piece.length)
    ]
    return list(zip(device, host, strict=True))


@given(nodes_and_chunks())
def test_ranges_are_the_bytes_that_the_layout_names(
    drawn: tuple[Node, list[int], list[int]],
) -> None:
    node, chunks, blocks = drawn
    ranges = node.ranges().of(np.array(chunks, dtype=np.int32), np.array(blocks, dtype=np.int32))
    spelled = [
        (int(device) + byte, int(host) + byte)
        for device, host, length in zip(ranges.device, ranges.host, ranges.lengths, strict=True)
        for byte in range(length)
    ]
    expected = [
        pair
        for chunk, block in zip(chunks, blocks, strict=True)
        for pair in by_the_layout(node, chunk, block)
    ]
    assert spelled == expected
    assert ranges.total_bytes == len(chunks) * node.layout.chunk_bytes


@given(nodes_and_chunks(), st.data())
def test_no_range_leaves_its_slice_or_its_registration(
    drawn: tuple[Node, list[int], list[int]], data: st.DataObject
) -> None:
    node, chunks, blocks = drawn
    host = node.host
    # One registration per layer, some of them cut again between two slices.
    registrations = []
    for layer in range(len(host.addresses)):
        start, end = host.layer_range(layer)
        cut = start + host.slice_bytes * data.draw(st.integers(0, host.blocks))
        registrations += [(a, b - a) for a, b in ((start, cut), (cut, end)) if b > a]
    require_whole_slices(host, registrations)
    ranges = node.ranges().of(np.array(chunks, dtype=np.int32), np.array(blocks, dtype=np.int32))
    for address, length in zip(ranges.host, ranges.lengths, strict=True):
        assert length > 0
        inside = [
            start <= address and address + length <= start + size for start, size in registrations
        ]
        assert inside.count(True) == 1
        in_slices = [
            (address - first) // host.slice_bytes
            == (address + length - 1 - first) // host.slice_bytes
            for first, behind in (host.layer_range(layer) for layer in range(len(host.addresses)))
            if first <= address < behind
        ]
        assert in_slices == [True]


SLICES = HostSlices((1000, 1400), slice_bytes=100, blocks=4)


def test_registrations_may_end_between_slices_and_between_layers() -> None:
    require_whole_slices(SLICES, [(1000, 800)])
    require_whole_slices(SLICES, [(1000, 300), (1300, 300), (1600, 200)])
    require_whole_slices(SLICES, [(0, 5000)])


@pytest.mark.parametrize("cut", [1001, 1350, 1799])
def test_a_registration_that_ends_inside_a_slice_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=f"ends at {cut:#x} cuts a slice of layer"):
        require_whole_slices(SLICES, [(1000, cut - 1000), (cut, 1800 - cut)])


@pytest.mark.parametrize(
    "registrations", [[], [(1000, 400)], [(1000, 700)], [(1100, 700)], [(1000, 500), (1600, 200)]]
)
def test_memory_that_is_not_pinned_is_refused(registrations: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="is not registered from"):
        require_whole_slices(SLICES, registrations)


def small() -> Node:
    layout = ChunkLayout(layers=2, slice_bytes=100, chunk_bytes=60)
    return Node(layout, SLICES, (DeviceRun(9000, 80, 40), DeviceRun(9040, 80, 20)), 5)


@pytest.mark.parametrize("chunk", [-1, 12])
def test_a_chunk_that_the_pool_does_not_have_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=rf"chunk {chunk} does not exist; there are 0\.\.11"):
        small().ranges().of(np.array([0, chunk]), np.array([0, 1]))


def test_a_gpu_block_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GPU block 5 does not exist; there are 0\.\.4"):
        small().ranges().of(np.array([0]), np.array([5]))


def test_a_chunk_goes_with_one_gpu_block() -> None:
    with pytest.raises(ValueError, match="2 chunks for 1 GPU blocks"):
        small().ranges().of(np.array([0, 1]), np.array([0]))


def test_pages_that_are_neighbours_are_copied_as_one() -> None:
    assert join_neighbours(small().pages) == (DeviceRun(9000, 80, 60),)
    apart = (DeviceRun(9000, 80, 40), DeviceRun(9041, 80, 20), DeviceRun(9061, 90, 20))
    assert join_neighbours(apart) == apart


def test_a_pool_of_another_shape_than_the_schedulers_is_refused() -> None:
    node = small()
    with pytest.raises(ValueError, match=r"2 layers with slices of 100 B, but .* 3 of 100 B"):
        ChunkRanges(ChunkLayout(3, 100, 60), node.host, node.pages, 5)
    with pytest.raises(ValueError, match="take 60 B, but a chunk is laid out for 61 B"):
        ChunkRanges(ChunkLayout(2, 100, 61), node.host, node.pages, 5)


def test_full_geometry_of_glm_5_in_two_tebibytes() -> None:
    """78 sparse layers, 21 indexer layers, 64-token blocks; addresses only, nothing allocated."""
    layout = ChunkLayout(layers=78, slice_bytes=64 * 656, chunk_bytes=21 * 64 * 132)
    blocks = (2 << 40) // layout.block_bytes
    layer_bytes = blocks * layout.slice_bytes
    host = HostSlices(tuple((1 << 45) + i * layer_bytes for i in range(78)), 64 * 656, blocks)
    page = 64 * 132
    # A GPU block is rounded up for the hot pages that share it.
    pages = [DeviceRun((1 << 46) + i * page, 209_920, page) for i in range(21)]
    runs = join_neighbours(pages)
    assert len(runs) == 1
    ranges = ChunkRanges(layout, host, runs, device_blocks=400_000)
    chunks = np.array([0, 17, blocks * 18 - 1, blocks * 9 + 5], dtype=np.int32)
    found = ranges.of(chunks, np.array([1, 2, 399_999, 7], dtype=np.int32))
    assert found.total_bytes == 4 * 177_408
    # 177,408 B of slices of 41,984 B: five or six pieces instead of 21 pages.
    assert 20 <= found.lengths.size <= 24
    assert host.addresses[0] <= found.host.min()
    assert (found.host + found.lengths).max() <= host.layer_range(77)[1]
    assert (found.lengths % 256 == 0).all()


CALLS = list[Any]


class RecordedStream:
    def __init__(self, name: str, calls: CALLS) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: RecordedStream) -> None:
        self.calls.append((self.name, "waits for", other.name))


class RecordedEvent:
    def __init__(self, calls: CALLS) -> None:
        self.calls = calls

    def record(self, stream: RecordedStream) -> None:
        self.calls.append((stream.name, "event"))

    def elapsed_time(self, later: RecordedEvent) -> float:
        return 1.0


class RecordedCalls:
    """Stands where ``CudaCalls`` is."""

    def __init__(self) -> None:
        self.calls: CALLS = []
        self.compute = RecordedStream("compute", self.calls)
        self.events = 0

    def new_stream(self) -> RecordedStream:
        return RecordedStream("lane", self.calls)

    def compute_stream(self) -> RecordedStream:
        return self.compute

    def new_event(self) -> RecordedEvent:
        self.events += 1
        return RecordedEvent(self.calls)

    @contextmanager
    def on(self, stream: RecordedStream) -> Any:
        self.calls.append(("on", stream.name))
        yield
        self.calls.append(("off", stream.name))

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor, stable: bool
    ) -> None:
        assert not source.is_pinned()
        self.calls.append((source.tolist(), target.tolist(), lengths.tolist(), stable))


def submit(*, source_is_stable: bool, others: bool, size: int = 2) -> tuple[CALLS, Any]:
    cuda: Any = RecordedCalls()
    mirror = RecordedStream("mirror", cuda.calls)
    lane = CudaLane(
        cuda,
        source_is_stable=source_is_stable,
        others=(lambda: (mirror,)) if others else tuple,
    )
    values = [np.arange(size, dtype=np.int64) + 10 * which for which in range(3)]
    return cuda.calls, lane.submit(*values)


def test_a_copy_waits_for_the_model_and_for_others_and_stands_between_two_events() -> None:
    calls, _ = submit(source_is_stable=False, others=True)
    assert calls == [
        ("lane", "waits for", "compute"),
        ("lane", "waits for", "mirror"),
        ("on", "lane"),
        ("lane", "event"),
        ([0, 1], [10, 11], [20, 21], False),
        ("lane", "event"),
        ("off", "lane"),
    ]


def test_only_a_lane_whose_source_is_stable_lets_the_driver_read_early() -> None:
    calls, _ = submit(source_is_stable=True, others=False)
    assert calls[3][-1] is True


def test_an_empty_batch_is_only_an_event() -> None:
    calls, _ = submit(source_is_stable=True, others=False, size=0)
    assert calls == [
        ("lane", "waits for", "compute"),
        ("on", "lane"),
        ("lane", "event"),
        ("lane", "event"),
        ("off", "lane"),
    ]


def test_a_copy_takes_its_time_from_the_device() -> None:
    class Event:
        def __init__(self, at_ms: float) -> None:
            self.at_ms = at_ms

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    assert CudaCopy(Event(5.0), Event(255.0), (), []).seconds() == 0.25


def test_events_are_made_once_and_used_again() -> None:
    cuda: Any = RecordedCalls()
    lane = CudaLane(cuda, source_is_stable=True)
    values = [np.arange(2, dtype=np.int64)] * 3
    copies: list[Any] = []
    for at_once in (1, 3, 2, 3):
        copies = [lane.submit(*values) for _ in range(at_once)]
        for copy in copies:
            copy.seconds()
    assert cuda.events == 2 * 3, "as many as were ever under way at once"


class Memory:
    """Host pool and GPU slab of one node, in the reference node's shape.

    The slab's blocks hold the indexer pages behind ``gap`` other bytes, with ``between`` bytes
    from one page to the next.
    """

    def __init__(
        self, seed: int, *, layers: int, groups: int, block: int, gap: int, between: int
    ) -> None:
        from hisparsed.engine.reference.connectors import reference_chunk_layout
        from hisparsed.engine.reference.model_folder import INDEX_ROW_BYTES, ROW_BYTES

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
        from hisparsed.engine.reference.connectors import LentChunkWorker

        return LentChunkWorker(self.store, self.layout)

    def cuda_worker(self) -> CudaChunkWorker:
        return CudaChunkWorker(
            ChunkRanges(self.layout, self.slices, self.runs, self.num_blocks),
            Lanes(SlowLane(Stream()), one_stream_lane(), one_stream_lane()),
            writes=True,
            before_store=lambda: None,
        )


@pytest.mark.examples
@settings(max_examples=examples(12, 40))
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
