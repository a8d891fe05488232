"""Row copies: right bytes to the right place on every layer, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from lockstep import BACKENDS, INTERPRETED

from hisparsed.kernels.api import (
    Geometry,
    ResolverState,
    RowLayout,
    apply_moves,
    gather,
    reset,
    resolve,
    set_capacity,
)
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("cpp_is_built")

SIZE, ROW = 4, 16
PAGE = SIZE * ROW
PACKED = RowLayout(
    block_size=SIZE,
    row_bytes=ROW,
    host_block_bytes=PAGE,
    slab_block_bytes=3 * PAGE + 40,
    host_offsets=(0, 50 * PAGE),
    slab_offsets=(8, 8 + 2 * PAGE),
)
"""Two layers: contiguous on the host, interleaved in slab blocks with foreign bytes around."""
STEPS = examples(12, 60) if INTERPRETED else 60


def memory(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def copied_by_hand(
    host: torch.Tensor, slab: torch.Tensor, layout: RowLayout, pairs: list[tuple[int, int]]
) -> torch.Tensor:
    expected = slab.clone()
    for source, target in pairs:
        for host_offset, slab_offset in zip(layout.host_offsets, layout.slab_offsets, strict=True):
            start = host_offset + source // SIZE * layout.host_block_bytes + source % SIZE * ROW
            end = slab_offset + target // SIZE * layout.slab_block_bytes + target % SIZE * ROW
            expected[end : end + ROW] = host[start : start + ROW]
    return expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_offsets_inside_a_packed_block(backend: str) -> None:
    host, slab = memory(100 * PAGE, 1), memory(30 * PACKED.slab_block_bytes, 2)
    expected = copied_by_hand(host, slab, PACKED, [(3, 17), (199, 4), (8, 119)])
    swap_host = torch.tensor([[3, 199], [77, -5], [8, -1]])
    swap_physical = torch.tensor([[17, 4], [90, -5], [119, -1]])
    counts = torch.tensor([2, 0, 1], dtype=torch.int32)
    gather(host, slab, PACKED, swap_host, swap_physical, counts, backend=backend)
    assert torch.equal(slab, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_host_blocks_that_hold_all_layers(backend: str) -> None:
    layout = RowLayout(SIZE, ROW, 2 * PAGE, 2 * PAGE, (0, PAGE), (PAGE, 0))
    host, slab = memory(80 * PAGE, 3), memory(80 * PAGE, 4)
    pairs = [(row * 7 % 160, row) for row in range(150)]
    expected = copied_by_hand(host, slab, layout, pairs)
    swap = torch.tensor(pairs).view(3, 50, 2)
    counts = torch.full((3,), 50, dtype=torch.int32)
    gather(
        host,
        slab,
        layout,
        swap[..., 0].contiguous(),
        swap[..., 1].contiguous(),
        counts,
        backend=backend,
    )
    assert torch.equal(slab, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [(200, 0), (0, 120), (-1, 0), (0, -1), (2**62, 0), (0, 2**62)])
def test_row_outside_the_memory_is_refused(backend: str, pair: tuple[int, int]) -> None:
    host, slab = memory(100 * PAGE, 1), memory(30 * PACKED.slab_block_bytes, 2)
    before = slab.clone()
    swap_host, swap_physical = torch.tensor([[pair[0]]]), torch.tensor([[pair[1]]])
    said = rf"host row {pair[0]} to physical row {pair[1]} .* 0 to 199, physical rows 0 to 119"
    with pytest.raises(IndexError, match=said):
        gather(
            host,
            slab,
            PACKED,
            swap_host,
            swap_physical,
            torch.ones(1, dtype=torch.int32),
            backend=backend,
        )
    assert torch.equal(slab, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [3, -1])
def test_a_count_beyond_the_list_is_refused(backend: str, count: int) -> None:
    host, slab = memory(100 * PAGE, 1), memory(30 * PACKED.slab_block_bytes, 2)
    before = slab.clone()
    rows, counts = torch.tensor([[3, 4], [5, 6]]), torch.tensor([0, count], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"swap_counts of row 1 must be 0 to 2, got {count}"):
        gather(host, slab, PACKED, rows, rows, counts, backend=backend)
    assert torch.equal(slab, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_two_to_the_31_are_copied(backend: str) -> None:
    """Addresses only: pages that are never touched are not backed by memory."""
    layout = RowLayout(SIZE, 1, SIZE, SIZE, (0,), (0,))
    host, slab = (torch.empty(2**31 + 64, dtype=torch.uint8) for _ in range(2))
    host[-16:] = memory(16, 9)
    rows = torch.arange(2**31 + 48, 2**31 + 64).view(1, 16)
    counts = torch.tensor([16], dtype=torch.int32)
    gather(host, slab, layout, rows, rows, counts, backend=backend)
    assert torch.equal(slab[-16:], memory(16, 9))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_the_right_bytes_through_loads_spills_and_shrinks(backend: str) -> None:
    """Every valid reference must read its host row, whatever happened to the hot buffer."""
    generator = torch.Generator().manual_seed(5)
    geometry = Geometry(SIZE, SIZE, slab_blocks=30, host_blocks=50)
    state = ResolverState.create(1, 20, 160)
    host, slab = memory(100 * PAGE, 6), memory(30 * PACKED.slab_block_bytes, 7)
    one = torch.zeros(1, dtype=torch.int32)
    source = torch.randperm(49, generator=generator).add(1)[:40].int().view(1, 40)
    hot = torch.tensor([[20, 3, 11, 7, 9]], dtype=torch.int32)
    reset(state, 0, capacity=20)
    for step in range(STEPS):
        capacity = int(torch.randint(3, 21, (1,), generator=generator))
        apply_moves(slab, PACKED, hot[0], set_capacity(state, 0, capacity))
        topk = torch.randperm(60, generator=generator)[:10].int().view(1, 10)
        out = resolve(
            state,
            geometry,
            topk,
            one,
            one,
            source,
            torch.zeros_like(source),
            hot,
            torch.tensor([25, 26], dtype=torch.int32),
            backend=backend,
        )
        gather(
            host,
            slab,
            PACKED,
            out.swap_host,
            out.swap_physical,
            out.swap_counts,
            backend=backend,
        )
        assert out.valid_counts.tolist() == [10], step
        for position, physical in zip(topk[0].tolist(), out.physical_rows[0].tolist(), strict=True):
            row = int(source[0, position // SIZE]) * SIZE + position % SIZE
            read = copied_by_hand(host, slab, PACKED, [(row, physical)])
            assert torch.equal(read, slab), f"step {step}: position {position} reads other bytes"
    assert int(state.counters[0, 4]) > 0


def test_moves_need_the_blocks_they_come_from() -> None:
    slab = memory(30 * PACKED.slab_block_bytes, 8)
    moves = torch.tensor([[9, 0]], dtype=torch.int32)
    with pytest.raises(IndexError, match="return blocks only after the moves"):
        apply_moves(slab, PACKED, torch.tensor([4, 5, 0], dtype=torch.int32), moves)
    with pytest.raises(IndexError, match="moves name slot -9"):
        apply_moves(slab, PACKED, torch.tensor([4, 5, 6], dtype=torch.int32), -moves)
