"""Tests of the Triton backend alone, run by Triton's interpreter on CPU tensors.

Not collected by name: test_triton.py runs this in a separate process.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lockstep import Lockstep, Shape

from hisparsed.kernels import (
    backends,
    torch_gather,
    triton_backend,
    triton_errors,
    triton_workspace,
)
from hisparsed.kernels.api import Geometry, Resolution, ResolverState, RowLayout, gather, reset
from hisparsed.kernels.step import Step
from hisparsed.kernels.triton_errors import latch, raise_latched
from hisparsed.kernels.triton_workspace import workspace

CPU = torch.device("cpu")


def ints(data: list[Any]) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.int32)


def world_of_one(shape: Shape) -> tuple[Lockstep, Any]:
    """A lockstep with one request that owns everything, and how to step it."""
    world = Lockstep(shape)
    world.reset(0, shape.capacity)
    source = [list(range(1, shape.pages + 1))]
    hot = [list(range(1, shape.hot_blocks + 1))]

    def step(*rows: list[int]) -> Any:
        return world.step(
            list(rows), [0] * len(rows), [0], source, [[0] * shape.pages], hot, [3000]
        )

    return world, step


def test_interpreter_is_at_work() -> None:
    assert triton_backend.INTERPRETED
    assert backends.pick("triton", CPU) == "triton"
    with pytest.raises(ValueError, match="backend triton works on CUDA tensors, the state is on"):
        backends.pick("triton", torch.device("meta"))


def test_cut_off_searches_every_digit_of_stamps_that_lie_far_apart() -> None:
    rng = random.Random(1)
    world, step = world_of_one(Shape(states=1, capacity=12, topk=4, sample_period=1))
    for jump in (0, 1, 0, 300, 70_000, 0, 20_000_000, 2_000_000_000, 0, 0):
        world.oracle.rows[0].step += jump
        for state in world.states.values():
            state.step[0] += jump
        step(rng.sample(range(96), 4))
        step(rng.sample(range(96), 4))


def test_more_slots_words_ghosts_and_cells_than_one_turn_looks_at() -> None:
    rng = random.Random(2)
    shape = Shape(
        states=1,
        capacity=4300,
        positions=40_000,
        block_size=64,
        topk=1100,
        host_blocks=700,
        stride=64,
        sample_period=1,
        ghost_every=16,
    )
    _, step = world_of_one(shape)
    for _ in range(3):
        step(*(rng.sample(range(40_000), 1100) for _ in range(3)))


def test_run_that_crosses_the_rows_of_one_turn() -> None:
    """Padding up to row 254, then one request on both sides of row 256 and one behind it."""
    shape = Shape(states=2, capacity=3, positions=8, block_size=2, topk=1, sample_period=1)
    world = Lockstep(shape)
    for row in range(2):
        world.reset(row, 3)
    tables = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[0] * 4] * 2, [[1, 2], [3, 4]]]
    for _ in range(2):
        said = world.step(
            [[3]] * 254 + [[row] for row in range(6)],
            [-1] * 254 + [1, 1, 1, 1, 0, 0],
            [0, 1],
            *tables,
            [3000],
        )
    assert said.valid == [0] * 254 + [1] * 6
    assert world.oracle.rows[1].counters["spills"] == 2


def refused_step() -> tuple[ResolverState, Resolution]:
    """Two requests; the hot table of the first names one block less than its capacity needs."""
    state = ResolverState.create(2, 8, 40, sample_period=1)
    for row in range(2):
        reset(state, row, capacity=8)
    out = Resolution.create(2, 3)
    launches = triton_backend.resolve_launches(
        state,
        Step(
            Geometry(4, 4, 100, 100),
            topk=ints([[0, 9, 1], [2, 3, 5]]),
            request_ids=ints([0, 1]),
            state_of_request=ints([0, 1]),
            source_table=ints([[1, 2, 3], [3, 4, 5]]),
            resident_table=ints([[0, 0, 60], [0, 0, 0]]),
            hot_table=ints([[10, 0], [12, 13]]),
            scratch_table=None,
        ),
        out,
    )
    for launch in launches:
        launch.run()
    return state, out


def test_refused_request_reads_nothing_and_the_others_go_on() -> None:
    state, out = refused_step()
    assert out.physical_rows.tolist() == [[-1, 241, -1], [48, 49, 50]]
    assert out.valid_counts.tolist() == [1, 3]
    assert out.swap_counts.tolist() == [0, 3]
    assert state.step.tolist() == [0, 1]
    assert state.counters[0].tolist() == [0] * 6
    assert state.ghost_pos[0].tolist() == [-1]
    with pytest.raises(ValueError, match=r"row 0: capacity 8 needs 2 hot blocks, .* names 1"):
        raise_latched(CPU)
    raise_latched(CPU)


def test_latch_keeps_the_first_error_until_it_is_read() -> None:
    refused_step()
    latch(CPU)[5] = -7
    refused_step()
    assert latch(CPU).tolist()[5] == -7
    with pytest.raises(ValueError, match="names -7"):
        raise_latched(CPU)


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has none yet, and no graph."""
    monkeypatch.setattr(triton_workspace, "_spaces", {})
    monkeypatch.setattr(triton_workspace, "_captured", {})


@pytest.mark.usefixtures("no_workspace")
def test_workspace_is_one_a_device_and_stays_until_a_step_outgrows_it() -> None:
    small, large = ResolverState.create(2, 8, 40), ResolverState.create(3, 6, 5000)
    workspace(small, 1, 4)
    space = workspace(large, 4, 16)
    assert workspace(small, 64, 1) is space
    assert workspace(small, 1, 64) is space
    grown = workspace(small, 5, 16)
    assert grown.places.numel() == 80
    assert grown.bits.numel() == space.bits.numel() == 3 * 160


@pytest.mark.usefixtures("no_workspace")
def test_workspace_neither_grows_in_a_capture_nor_while_a_graph_may_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, other = ResolverState.create(2, 8, 40), ResolverState.create(2, 8, 40)
    with monkeypatch.context() as capture:
        capture.setattr(triton_workspace, "_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match=r"for 0 positions, .* captured; call reserve"):
            workspace(state, 1, 4)
        capture.undo()
        space = workspace(state, 8, 4)
        capture.setattr(triton_workspace, "_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="for 32 positions, and a graph is being captured"):
            workspace(state, 9, 4)
        assert workspace(state, 8, 4) is space
    with pytest.raises(RuntimeError, match=r"was captured; call reserve\(state, rows=9, topk=4\)"):
        workspace(other, 9, 4)
    assert workspace(other, 2, 16) is space
    del state
    assert workspace(other, 9, 4) is not space


def test_what_is_left_in_the_workspace_does_not_matter() -> None:
    rng = random.Random(6)
    shape = Shape(states=1, capacity=12, topk=4, sample_period=1)
    world, step = world_of_one(shape)
    for _ in range(6):
        step(*(rng.sample(range(96), 4) for _ in range(2)))
        for left in vars(workspace(world.states["triton"], 2, 4)).values():
            left.random_(-(2**31), 2**31 - 1)


def test_work_goes_with_the_context_in_use_not_with_the_longest_one() -> None:
    shape = Shape(
        states=1,
        capacity=12,
        positions=40_000,
        block_size=64,
        stride=64,
        topk=4,
        host_blocks=700,
    )
    world, step = world_of_one(shape)
    step([1, 70, 3, 4])
    bits = workspace(world.states["triton"], 1, 4).bits
    bits.fill_(-77)
    step([5, 95, 64, 4])
    assert (bits[:3] != -77).all()
    assert (bits[3:] == -77).all()


@pytest.mark.parametrize("launched", range(2))
def test_step_that_broke_off_leaves_nothing_to_the_next(
    launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, step = world_of_one(Shape(states=1, topk=4, capacity=4, sample_period=1))
    step([1, 2, 3, 4])
    state = world.states["triton"]
    kept = {name: word.clone() for name, word in vars(state).items() if torch.is_tensor(word)}
    every = triton_backend.resolve_launches

    def some(*arguments: Any) -> list[Any]:
        return [*every(*arguments)[:launched], None]

    tables = ints([list(range(1, 25))]), ints([[0] * 24]), ints([[1]])
    call = Step(world.geometry, ints([[2, 50, 60, 70]]), ints([0]), ints([0]), *tables, None)
    with monkeypatch.context() as broken:
        broken.setattr(triton_backend, "resolve_launches", some)
        with pytest.raises(AttributeError):
            triton_backend.resolve(state, call, Resolution.create(1, 4))
    for name, word in kept.items():
        getattr(state, name).copy_(word)
    step([2, 9, 10, 11])
    step([60, 70, 1, 4])


def test_latch_of_the_current_device_is_that_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    held = torch.zeros(6, dtype=torch.int64)
    monkeypatch.setitem(triton_errors._latches, ("cuda", 3), held)
    assert latch(torch.device("cuda")) is latch(torch.device("cuda:3")) is held


def row_copies(row_bytes: int, offset: int) -> RowLayout:
    page = 4 * row_bytes
    return RowLayout(
        4, row_bytes, 2 * page + offset, 3 * page + offset, (0, page), (offset, offset + page)
    )


@pytest.mark.parametrize(
    ("row_bytes", "offset", "word", "vector"),
    [(5, 1, 1, 1), (12, 4, 4, 1), (16, 0, 4, 4), (656, 16, 4, 4)],
)
def test_one_cold_request_is_dealt_to_all_programs(
    row_bytes: int, offset: int, word: int, vector: int
) -> None:
    generator = torch.Generator().manual_seed(row_bytes)
    layout = row_copies(row_bytes, offset)
    host, slab = (
        torch.randint(0, 256, (60 * layout.slab_block_bytes,), generator=generator).byte()
        for _ in range(2)
    )
    swaps = [torch.randperm(160, generator=generator)[:120].view(3, 40) for _ in range(2)]
    counts = ints([40, 1, 0])
    expected = slab.clone()
    torch_gather.gather(host, expected, layout, *swaps, counts)
    launch = triton_backend.gather_launch(host, slab, layout, *swaps, counts)
    assert (launch.arguments["word_bytes"], launch.arguments["aligned_words"]) == (word, vector)
    assert launch.grid[0] * launch.arguments["entries"] < 40
    gather(host, slab, layout, *swaps, counts, backend="triton")
    assert torch.equal(slab, expected)


def test_row_outside_is_left_out_on_every_layer_and_the_rest_is_copied() -> None:
    layout = row_copies(16, 0)
    host, slab = torch.arange(20 * 192).byte(), torch.zeros(20 * 192, dtype=torch.uint8)
    expected = slab.clone()
    swap_host, swap_physical = torch.tensor([[3, 10_000, 9]]), torch.tensor([[5, 1, 2]])
    torch_gather.gather(host, expected, layout, swap_host[:, ::2], swap_physical[:, ::2], ints([2]))
    with pytest.raises(IndexError, match="host row 10000 to physical row 1 reaches outside"):
        gather(host, slab, layout, swap_host, swap_physical, ints([3]), backend="triton")
    assert torch.equal(slab, expected)
