"""The cost model and the model of rows: published figures and what must hold between them."""

from __future__ import annotations

import pytest

from hisparsed.config.node_description import (
    CoreDescription,
    NodeDescription,
    load_node_description,
)
from hisparsed.engine.simulated.connectors import CopyQueue, GpuLink, LinkDirection
from hisparsed.engine.simulated.cost import CostModel, RowModel, StepWork, VirtualClock
from hisparsed.engine.simulated.work import StepPart, StepWorker, WorkTotals


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


class Share:
    """Of every request, ``resident`` of its pages on the GPU."""

    def __init__(self, resident: float) -> None:
        self.resident = resident

    def resident_share(self, request_id: str) -> float:
        return self.resident

    def hot_rows(self, request_id: str) -> int:
        return 4096


def worker(h200: NodeDescription, resident: float) -> StepWorker:
    rows = RowModel(2048, h200.rows.miss_curve, h200.rows.union)
    return StepWorker(rows, Share(resident), 64, 2048, 8192, lambda _: 1.0)


def test_a_chunk_of_a_prompt_reads_all_of_its_context_that_is_on_the_host(
    h200: NodeDescription,
) -> None:
    found = worker(h200, 0.0).of([StepPart("a", 70_000, 600, 0, 70_600)], WorkTotals())
    assert found.staged_rows == 70_000
    # 97 ms of a link that reads rows at 37 GB/s, whatever the prompt's tokens select.
    assert CostModel(h200).step(found).gather_s == pytest.approx(97e-3, rel=0.01)
    resident = worker(h200, 1.0).of([StepPart("a", 70_000, 600, 0, 70_600)], WorkTotals())
    assert resident.staged_rows == 0
    half = worker(h200, 0.5).of([StepPart("a", 70_000, 600, 0, 70_600)], WorkTotals())
    assert half.staged_rows == pytest.approx(35_300)


def test_it_is_read_once_for_what_the_whole_node_computes_in_a_step(
    h200: NodeDescription,
) -> None:
    """A part at 1/8 computes a prompt in chunks of an eighth."""
    node, tally = worker(h200, 0.0), WorkTotals()
    starts = range(20_000, 20_000 + 2 * 8192, 1024)
    staged = [
        node.of([StepPart("a", start, 1024, 0, 40_000)], tally).staged_rows for start in starts
    ]
    assert [start for start, rows in zip(starts, staged, strict=True) if rows] == [20_000, 28_192]
    # A preempted call starts again, and an ended one is forgotten.
    assert node.of([StepPart("a", 12_000, 1024, 0, 40_000)], tally).staged_rows == 12_000
    node.forget(["a"])
    assert node.of([StepPart("a", 12_000, 1024, 0, 40_000)], tally).staged_rows == 12_000


def test_what_prefill_reads_is_no_miss_of_a_hot_buffer(h200: NodeDescription) -> None:
    """The multiplier is steered by what decode steps miss."""
    cost, tally = CostModel(h200), WorkTotals()
    work = StepWork(tokens=600, loaded_rows=10.0, staged_rows=1000.0)
    tally.step(work, cost.step(work), cost)
    row = h200.model.row_bytes * h200.model.layers
    assert tally.counters(1, 1.0)["h2d_bytes"] == 10 * row
    assert tally.gather_bytes == 1010 * row


def test_host_memory_bounds_all_gpus_together(h200: NodeDescription) -> None:
    slow = h200.model_copy(
        update={"host": h200.host.model_copy(update={"memory_bandwidth": 8 * 10**9})}
    )
    work = StepWork(tokens=1, loaded_rows=1000.0)
    ratio = CostModel(slow).step(work).gather_s / CostModel(h200).step(work).gather_s
    assert ratio == pytest.approx(37)


def test_a_part_with_its_part_of_the_work_takes_as_long_as_the_whole(h200: NodeDescription) -> None:
    whole = StepWork(64, 64 * 1e5, 64 * 2048.0, 16 * 1e5, 16 * 3000.0, 900.0, 16)
    part = StepWork(8, 8 * 1e5, 8 * 2048.0, 2 * 1e5, 2 * 3000.0, 112.5, 2)
    assert CostModel(h200, 8).step(part) == CostModel(h200).step(whole)


def test_overlap_hides_its_share_of_the_row_reads(h200: NodeDescription) -> None:
    work = StepWork(tokens=8, loaded_rows=5000.0)
    halved = h200.model_copy(
        update={"speed": h200.speed.model_copy(update={"gather_overlap": 0.5})}
    )
    exposed, hidden = CostModel(h200).step(work), CostModel(halved).step(work)
    assert exposed.total_s - hidden.total_s == pytest.approx(exposed.gather_s / 2)


def test_gpus_that_read_a_part_of_a_prompt_each_still_read_all_that_decoding_misses(
    h200: NodeDescription,
) -> None:
    eighth = h200.model_copy(
        update={"speed": h200.speed.model_copy(update={"prefill_reads": 1 / 8})}
    )
    work = StepWork(tokens=600, loaded_rows=100.0, staged_rows=8000.0)
    row = h200.model.row_bytes * h200.model.layers
    assert CostModel(h200).gather_bytes(work) == 8100 * row
    assert CostModel(eighth).gather_bytes(work) == 1100 * row
    assert CostModel(eighth).loaded_bytes(work) == 100 * row


def with_core(node: NodeDescription, batches: int, **core: float) -> NodeDescription:
    engine = node.engine.model_copy(update={"concurrent_batches": batches})
    return node.model_copy(update={"engine": engine, "core": CoreDescription(**core)})


@pytest.mark.parametrize(("step_ms", "batches"), [(1.0, 1), (1.0, 2), (900.0, 1), (900.0, 2)])
def test_a_step_takes_what_the_engine_core_needs(
    h200: NodeDescription, step_ms: float, batches: int
) -> None:
    work = StepWork(64, 64 * 5e4, 64 * 2048.0, 16 * 5e4, 16 * 3900.0, requests=16)
    gpu_s = CostModel(with_core(h200, batches)).step(work).total_s
    described = with_core(h200, batches, step_ms=step_ms, request_ms=0.5, token_us=100.0)
    found = CostModel(described).step(work)
    core_s = (step_ms + 16 * 0.5 + 64 * 0.1) / 1e3
    assert found.core_s == pytest.approx(core_s)
    # Scheduled ahead, a step hides behind the GPU's or hides it.
    assert found.total_s == pytest.approx(max(gpu_s, core_s) if batches > 1 else gpu_s + core_s)


def drafting(node: NodeDescription, drafts: int) -> CostModel:
    engine = node.engine.model_copy(update={"speculative_tokens": drafts})
    return CostModel(node.model_copy(update={"engine": engine}))


def test_the_first_draft_is_one_layer_of_the_step_and_an_overhead(h200: NodeDescription) -> None:
    prefill = StepWork(8192, 8192 * 50_000.0, 8192 * 2048.0, requests=1)
    none, one = (drafting(h200, drafts).step(prefill) for drafts in (0, 1))
    assert none.draft_s == 0
    assert one.draft_s == pytest.approx(one.compute_s / 78 + h200.speed.draft_overhead_ms / 1e3)
    assert one.total_s == pytest.approx(none.total_s + one.draft_s)


def test_further_drafts_are_a_token_a_request(h200: NodeDescription) -> None:
    step = StepWork(64, 64 * 5e4, 64 * 2048.0, 16 * 5e4, 16 * 3900.0, requests=16)
    token = StepWork(16, 16 * 5e4, 16 * 2048.0, 16 * 5e4, 16 * 2048.0)
    cost = drafting(h200, 3)
    overhead_s = h200.speed.draft_overhead_ms / 1e3
    layers_s = (cost.step(step).memory_s + 2 * cost.step(token).memory_s) / 78
    assert cost.step(step).draft_s == pytest.approx(layers_s + 3 * overhead_s)


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


def direction(clock: VirtualClock) -> LinkDirection:
    """A hundred bytes per second."""
    return LinkDirection(clock, lambda size: size / 100)


def test_copies_of_one_direction_wait_for_each_other_whoever_copies() -> None:
    clock = VirtualClock()
    one_way = direction(clock)
    pages, chunks = CopyQueue(one_way), CopyQueue(one_way)
    pages.submit(1, 100)
    chunks.submit(1, 300)
    assert one_way.next_done_s() == 1.0
    clock.advance(1.0)
    assert (pages.done(), chunks.done()) == ([1], [])
    chunks.wait_for({1})
    assert clock.now_s() == 4.0
    assert (pages.done(), chunks.done()) == ([], [1])
    assert one_way.next_done_s() is None
    assert one_way.bytes_total == 400


def test_directions_of_a_link_do_not_wait_for_each_other(h200: NodeDescription) -> None:
    link = GpuLink(VirtualClock(), CostModel(h200))
    CopyQueue(link.to_gpu).submit(1, 50e9)
    CopyQueue(link.to_host).submit(1, 25e9)
    assert link.next_done_s() == pytest.approx(0.5)
    assert link.to_gpu.next_done_s() == pytest.approx(1.0)
    assert link.bytes_total == 75e9


def test_copies_in_flight_give_way_and_those_that_have_ended_do_not() -> None:
    clock = VirtualClock()
    one_way = direction(clock)
    copies = CopyQueue(one_way)
    copies.submit(1, 100)
    copies.submit(2, 100)
    clock.advance(1.0)
    one_way.give_way(0.5)
    assert copies.done() == [1]
    assert one_way.next_done_s() == 2.5
    clock.advance(1.5)
    assert copies.done() == [2]
    one_way.give_way(0.5)
    copies.submit(3, 100)
    assert one_way.next_done_s() == 3.5, "nothing was in flight that could give way"


def test_host_memory_bounds_what_all_gpus_read_and_one_writes(h200: NodeDescription) -> None:
    slow = h200.model_copy(
        update={"host": h200.host.model_copy(update={"memory_bandwidth": 80 * 10**9})}
    )
    assert CostModel(h200).to_gpu_s(50e9) == CostModel(h200).to_host_s(50e9) == 1.0
    assert CostModel(slow).to_gpu_s(50e9) == 5.0
    assert CostModel(slow).to_host_s(50e9) == 1.0


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)
    clock.advance_to(3.0)
    assert clock.now_s() == 5.0
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1.0)
