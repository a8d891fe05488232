"""One named test for each behaviour the resolver promises; the oracle checks every word."""

from __future__ import annotations

import random

import pytest
import torch
from lockstep import BACKENDS, Lockstep, Shape
from oracle import OracleStep

from hisparsed.kernels.api import COUNTERS, Geometry, ResolverState, reset, resolve

pytestmark = pytest.mark.usefixtures("cpp_is_built")


class Node:
    """``requests`` requests with host-backed pages and a full hot lease each."""

    def __init__(self, shape: Shape, requests: int = 1, capacity: int | None = None) -> None:
        self.shape = shape
        self.world = Lockstep(shape)
        self.requests = range(requests)
        pages = shape.pages
        self.source = [[1 + r * pages + page for page in range(pages)] for r in self.requests]
        self.resident = [[0] * pages for _ in self.requests]
        first_hot = shape.slab_blocks - requests * shape.hot_blocks
        self.hot = [
            [first_hot + r * shape.hot_blocks + block for block in range(shape.hot_blocks)]
            for r in self.requests
        ]
        for request in self.requests:
            self.world.reset(request, shape.capacity if capacity is None else capacity)

    def step(
        self,
        topk: list[list[int]],
        request_ids: list[int] | None = None,
        scratch: list[int] | None = None,
    ) -> OracleStep:
        return self.world.step(
            topk,
            [0] * len(topk) if request_ids is None else request_ids,
            list(self.requests),
            self.source,
            self.resident,
            self.hot,
            scratch,
        )

    def counters(self, request: int = 0) -> dict[str, int]:
        return dict(self.world.oracle.rows[request].counters)


def large(topk: int, capacity: int, **changes: int) -> Shape:
    return Shape(
        **{
            "states": 1,
            "capacity": capacity,
            "positions": 16384,
            "block_size": 64,
            "stride": 100,
            "slab_blocks": 2000,
            "host_blocks": 2000,
            "topk": topk,
            "ghost_every": 64,
            **changes,
        }
    )


def picks(rng: random.Random, limit: int, count: int) -> list[int]:
    return rng.sample(range(limit), count)


@pytest.mark.parametrize("topk", [1, 31, 32, 33, 63, 64, 65, 128, 2048])
def test_cold_fill_loads_every_row_in_position_order(topk: int) -> None:
    node = Node(large(topk, 2048))
    row = picks(random.Random(topk), 16384, topk)
    said = node.step([row])
    assert node.counters()["loads"] == topk
    assert said.swap_host[0] == sorted(said.swap_host[0])
    assert all(said.miss[0])


def test_warm_replay_is_a_fixed_point_without_loads() -> None:
    node = Node(large(128, 256))
    row = picks(random.Random(1), 16384, 128)
    first = node.step([row])
    again = node.step([row])
    assert again.swap_host == [[]]
    assert again.physical == first.physical
    assert not any(again.miss[0])


def test_padding_rows_come_out_as_minus_one_and_write_no_state() -> None:
    node = Node(Shape(states=2), requests=2)
    node.world.step(
        [[1, 2, 3, -1, -1, -1], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]],
        [0, -1, 1],
        [0, -1],
        node.source,
        node.resident,
        node.hot,
    )
    assert node.counters(1) == {}
    assert node.world.oracle.rows[1].step == 0


@pytest.mark.parametrize("multiplier", [2, 5])
def test_full_size_rows_with_hot_rows_of_a_multiple(multiplier: int) -> None:
    rng = random.Random(multiplier)
    node = Node(large(2048, 2048 * multiplier))
    for _ in range(4):
        node.step([picks(rng, 16384, 2048)])
    assert node.counters()["hits"] > 0


@pytest.mark.parametrize("rows", [5, 17, 64])
def test_many_requests_in_one_step_do_not_mix(rows: int) -> None:
    rng = random.Random(rows)
    node = Node(Shape(states=rows, host_blocks=rows * 30), requests=rows)
    for _ in range(3):
        node.step([picks(rng, 96, 6) for _ in range(rows)], list(range(rows)))


def test_mtp_rows_that_are_disjoint_each_own_one_slot() -> None:
    rng = random.Random(4)
    node = Node(large(2048, 8192))
    chosen = picks(rng, 16384, 4 * 2048)
    rows = [chosen[i * 2048 : (i + 1) * 2048] for i in range(4)]
    said = node.step(rows)
    assert len({physical for row in said.physical for physical in row}) == 4 * 2048
    assert node.counters()["loads"] == 4 * 2048
    assert [len(row) for row in said.swap_host] == [2048] * 4


def test_mtp_rows_are_one_union_and_never_evict_each_other() -> None:
    node = Node(Shape(states=1, capacity=6, topk=3, block_size=2))
    node.step([[0, 1, 2], [2, 3, 4]])
    said = node.step([[5, 6, 7], [0, 1, 2]])
    assert said.miss == [[True] * 3, [False] * 3]


def test_duplicates_inside_a_row_take_one_slot_and_count_as_references() -> None:
    node = Node(Shape(states=1))
    said = node.step([[3, 3, 9, 3, 9, -1]])
    assert said.physical[0][0] == said.physical[0][1] == said.physical[0][3]
    assert said.miss[0] == [True] * 5 + [False]
    assert node.counters() == {"references": 5, "hits": 0, "loads": 2}


def test_fully_resident_rows_leave_slots_and_step_alone() -> None:
    node = Node(Shape(states=1))
    node.step([[0, 1, 2, 3, 4, 5]])
    node.resident = [[7] * node.shape.pages]
    node.step([[0, 1, 2, 30, 31, 32]])
    assert node.world.oracle.rows[0].step == 1
    assert node.counters()["resident"] == 6


def test_resident_page_wins_over_a_held_slot() -> None:
    node = Node(Shape(states=1))
    node.step([[0, 1, 2, 3, 4, 5]])
    node.resident[0][0] = 7
    said = node.step([[0, 1, 2, 3, 4, 5]])
    assert said.physical[0][:4] == [28, 29, 30, 31]


def test_null_source_page_and_rows_beyond_the_host_pool_are_nowhere() -> None:
    node = Node(Shape(states=1, host_blocks=20))
    node.source[0][:3] = [0, 20, 21]
    said = node.step([[0, 4, 8, 12, -1, 10_000]])
    assert [physical >= 0 for physical in said.physical[0]] == [False] * 3 + [True] + [False] * 2
    assert said.valid == [1]
    assert node.counters()["references"] == 1


def test_slots_come_back_empty_when_capacity_grows_after_a_shrink() -> None:
    node = Node(Shape(states=1))
    for start in (0, 6, 12):
        node.step([list(range(start, start + 6))])
    node.world.set_capacity(0, 4)
    node.world.set_capacity(0, 16)
    said = node.step([[2, 3, 4, 5, 6, 7]])
    assert said.miss[0] == [True] * 6
    assert len(node.world.oracle.rows[0].held) == 10


def test_state_row_of_a_new_owner_starts_empty_but_keeps_its_step() -> None:
    node = Node(Shape(states=1))
    node.step([[0, 1, 2, 3, 4, 5]])
    node.world.reset(0, 16)
    node.source[0] = node.source[0][::-1]
    said = node.step([[0, 1, 2, 3, 4, 5]])
    assert said.miss[0] == [True] * 6
    assert node.world.oracle.rows[0].step == 2


def test_rewritten_row_is_loaded_again() -> None:
    node = Node(Shape(states=1))
    node.step([[0, 1, 2, 3, 4, 5]])
    node.world.invalidate([(0, 3), (0, 3), (0, 60), (-1, 2)])
    said = node.step([[0, 1, 2, 3, 4, 5]])
    assert said.miss[0] == [False, False, False, True, False, False]


def test_rows_are_addressed_past_two_to_the_31() -> None:
    shape = Shape(states=1, slab_blocks=2**31 - 1, stride=3000, host_blocks=2**31 - 1)
    node = Node(shape)
    node.source[0][0] = 2**31 - 2
    said = node.step([[0, 1, 2, 30, 31, 32]])
    assert max(said.swap_host[0]) > 2**32
    assert max(said.attention[0]) > 2**42


def test_rows_beyond_the_capacity_go_through_scratch_and_are_not_kept() -> None:
    node = Node(Shape(states=1, capacity=4))
    said = node.step([[0, 1, 2, 3, 4, 5]], scratch=[900])
    assert said.physical[0][4:] == [3600, 3601]
    assert node.counters() == {"references": 6, "hits": 0, "loads": 4, "spills": 2}
    again = node.step([[0, 1, 2, 3, 4, 5]], scratch=[900])
    assert again.miss[0] == [False] * 4 + [True] * 2


def test_scratch_is_dealt_to_requests_in_order_and_the_rest_is_dropped() -> None:
    node = Node(Shape(states=2, topk=4), requests=2, capacity=1)
    said = node.step([[0, 1, 2, 3], [0, 1, 2, 3]], [1, 0], scratch=[900, 0, 901])
    assert said.valid == [4, 2]
    assert said.physical[1][2:] == [-1, -1]
    assert node.counters(1)["spills"] == 3
    assert (node.counters(0)["spills"], node.counters(0)["dropped"]) == (1, 2)


def test_capacity_zero_without_scratch_drops_and_does_not_crash() -> None:
    node = Node(Shape(states=1), capacity=0)
    said = node.step([[0, 1, 2, 3, 4, 5]])
    assert said.valid == [0]
    assert node.counters()["dropped"] == 6


def test_counters_add_up_when_rows_have_no_duplicates() -> None:
    rng = random.Random(9)
    node = Node(Shape(states=3), requests=3, capacity=4)
    node.resident[1] = [rng.choice([0, 7]) for _ in node.resident[1]]
    for _ in range(30):
        node.step([picks(rng, 96, 6) for _ in range(3)], [0, 1, 2], scratch=[900])
    for request in range(3):
        counted = node.counters(request)
        assert counted["references"] == 30 * 6
        assert counted["references"] == sum(
            counted.get(name, 0) for name in COUNTERS if name != "references"
        )


def test_threads_do_not_change_a_step_that_is_large_enough_for_them() -> None:
    rng = random.Random(11)
    requests, topk = 8, 2048
    topk_rows = torch.tensor([picks(rng, 8000, topk) for _ in range(requests)], dtype=torch.int32)
    ids = torch.arange(requests, dtype=torch.int32)
    source = (torch.arange(requests * 125, dtype=torch.int32) + 1).view(requests, 125)
    hot = (torch.arange(requests * 64, dtype=torch.int32) + 1).view(requests, 64)
    geometry = Geometry(64, 64, 2000, 2000)
    results = []
    for backend in BACKENDS:
        state = ResolverState.create(requests, 4096, 8000)
        for row in range(requests):
            reset(state, row, capacity=4096)
        for shift in range(5):
            out = resolve(
                state,
                geometry,
                (topk_rows + 400 * shift) % 8000,
                ids,
                ids,
                source,
                torch.zeros_like(source),
                hot,
                backend=backend,
            )
        results.append((out.physical_rows, state.slot_pos, state.slot_stamp, state.counters))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
