"""The cost model and the model of rows: published figures and what must hold between them."""

from __future__ import annotations

import pytest

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.engine.simulated.clock import VirtualClock
from hisparsed.engine.simulated.copies import CopyQueue
from hisparsed.engine.simulated.cost import CostModel, StepWork
from hisparsed.engine.simulated.rows import RowModel


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description("8xh200-glm-5.3")


@pytest.fixture(scope="module")
def rows(h200: NodeDescription) -> RowModel:
    return RowModel(h200.model.topk, h200.rows.miss_curve, h200.rows.union)


def test_row_reads_are_the_published_449_mb_and_12_ms(h200: NodeDescription) -> None:
    work = StepWork(tokens=64, loaded_rows=64 * 2048 * 0.067)
    cost = CostModel(h200)
    assert cost.gather_bytes(work) == pytest.approx(449e6, rel=0.002)
    assert cost.step(work).gather_s == pytest.approx(12e-3, rel=0.02)


def test_host_memory_bounds_all_gpus_together(h200: NodeDescription) -> None:
    slow = h200.model_copy(
        update={"host": h200.host.model_copy(update={"memory_bandwidth": 8 * 10**9})}
    )
    work = StepWork(tokens=1, loaded_rows=1000.0)
    ratio = CostModel(slow).step(work).gather_s / CostModel(h200).step(work).gather_s
    assert ratio == pytest.approx(37)


def test_a_part_with_its_part_of_the_work_takes_as_long_as_the_whole(h200: NodeDescription) -> None:
    whole = StepWork(64, 64 * 1e5, 64 * 2048.0, 16 * 1e5, 16 * 3000.0, 900.0)
    part = StepWork(8, 8 * 1e5, 8 * 2048.0, 2 * 1e5, 2 * 3000.0, 112.5)
    assert CostModel(h200, 8).step(part) == CostModel(h200).step(whole)


def test_overlap_hides_its_share_of_the_row_reads(h200: NodeDescription) -> None:
    work = StepWork(tokens=8, loaded_rows=5000.0)
    halved = h200.model_copy(
        update={"speed": h200.speed.model_copy(update={"gather_overlap": 0.5})}
    )
    exposed, hidden = CostModel(h200).step(work), CostModel(halved).step(work)
    assert exposed.total_s - hidden.total_s == pytest.approx(exposed.gather_s / 2)


def test_prefill_is_bound_by_compute_and_decode_by_memory(h200: NodeDescription) -> None:
    cost = CostModel(h200)
    prefill = cost.step(StepWork(8192, 8192 * 50_000.0, 8192 * 2048.0))
    decode = cost.step(StepWork(64, 64 * 50_000.0, 64 * 2048.0, 16 * 50_000.0, 16 * 3900.0))
    assert prefill.compute_s > prefill.memory_s
    assert decode.memory_s > decode.compute_s


@pytest.mark.parametrize(("multiplier", "misses"), [(1, 0.30), (2, 0.134), (4, 0.067)])
def test_misses_are_the_published_ones(rows: RowModel, multiplier: int, misses: float) -> None:
    found = rows.step(142_000, 1, 0.0, multiplier * 2048)
    assert (found.loads + found.spills) / found.selected == pytest.approx(misses)


def test_misses_fall_with_the_buffer_from_all_to_few(rows: RowModel) -> None:
    misses = [rows.misses(ratio / 8) for ratio in range(80)]
    assert misses[0] == 1.0
    assert misses == sorted(misses, reverse=True)


def test_resident_rows_miss_nothing_and_leave_the_buffer_to_others(rows: RowModel) -> None:
    none = rows.step(142_000, 1, 0.0, 2048)
    half = rows.step(142_000, 1, 0.5, 2048)
    full = rows.step(142_000, 1, 1.0, 0)
    assert full.loads == full.spills == 0
    assert half.loads < none.loads / 2
    assert half.resident == pytest.approx(1024)


def test_rows_beyond_the_buffer_spill(rows: RowModel) -> None:
    found = rows.step(142_000, 4, 0.0, 2048)
    assert found.selected == pytest.approx(1.91 * 2048)
    assert found.spills == pytest.approx(found.selected - 2048)
    wide = rows.step(142_000, 4, 0.0, 8192)
    assert wide.spills == 0
    total = found.resident + found.hits + found.loads + found.spills
    assert total == pytest.approx(found.selected)


def test_a_context_that_fits_the_buffer_misses_nothing(rows: RowModel) -> None:
    assert rows.step(2000, 1, 0.0, 2048).loads == 0


def test_copies_queue_on_one_link() -> None:
    clock = VirtualClock()
    queue = CopyQueue(clock, lambda size: size / 100)
    queue.submit(1, 100)
    queue.submit(2, 300)
    assert queue.next_done_s() == 1.0
    clock.advance(1.0)
    assert queue.done() == [1]
    queue.wait_for({2})
    assert clock.now_s() == 4.0
    assert queue.done() == [2]
    assert queue.next_done_s() is None


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)
    clock.advance_to(3.0)
    assert clock.now_s() == 5.0
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1.0)
