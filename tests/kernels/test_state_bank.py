"""Many rows of many states at once: the same words as one row of one state after the other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hisparsed.kernels.api import (
    Geometry,
    ResolverState,
    StateBank,
    invalidate,
    reset,
    resolve,
    set_capacity,
    shrink_rows,
    state_bytes,
)

pytestmark = pytest.mark.usefixtures("cpp_is_built")

GROUPS, STATES, CAPACITY, BLOCK, PAGES, TOPK = 3, 5, 24, 4, 20, 6
POSITIONS = PAGES * BLOCK
GEOMETRY = Geometry(BLOCK, BLOCK, 1000, 1000)
SOURCE = torch.arange(1, STATES * PAGES + 1, dtype=torch.int32).view(STATES, PAGES)
RESIDENT = torch.zeros(STATES, PAGES, dtype=torch.int32)
HOT = torch.arange(500, 500 + STATES * 6, dtype=torch.int32).view(STATES, 6)
OWN = torch.arange(STATES, dtype=torch.int32)
OPTIONS = {"sample_period": 2, "ghost_every": 4}


class Twins:
    """A bank, and as many single states that ``upkeep`` keeps up one row at a time."""

    def __init__(self) -> None:
        self.bank = StateBank.create(GROUPS, STATES, CAPACITY, POSITIONS, **OPTIONS)
        self.single = [
            ResolverState.create(STATES, CAPACITY, POSITIONS, **OPTIONS) for _ in range(GROUPS)
        ]
        self.rng = random.Random(3)

    def step(self) -> None:
        rows = self.rng.sample(range(STATES), 3)
        self.bank.begin_step()
        for state in self.single:
            state.begin_step()
        for group in range(GROUPS):
            topk = torch.tensor(
                [self.rng.sample(range(POSITIONS), TOPK) for _ in rows], dtype=torch.int32
            )
            request_ids = torch.tensor(rows, dtype=torch.int32)
            for state in (self.bank.states[group], self.single[group]):
                resolve(state, GEOMETRY, topk, request_ids, OWN, SOURCE, RESIDENT, HOT)

    def begin(self) -> None:
        rows = self.rng.sample(range(STATES), 2)
        capacities = [[self.rng.randrange(8, CAPACITY + 1) for _ in rows] for _ in range(GROUPS)]
        self.bank.begin(torch.tensor(rows), torch.tensor(capacities, dtype=torch.int32))
        for state, of_group in zip(self.single, capacities, strict=True):
            for row, capacity in zip(rows, of_group, strict=True):
                reset(state, row, capacity=capacity)

    def grow(self) -> None:
        rows = self.rng.sample(range(STATES), 3)
        larger = [
            [min(CAPACITY, int(state.capacity[row]) + self.rng.choice([0, 3])) for row in rows]
            for state in self.single
        ]
        self.bank.grow(torch.tensor(rows), torch.tensor(larger, dtype=torch.int32))
        for state, of_group in zip(self.single, larger, strict=True):
            for row, capacity in zip(rows, of_group, strict=True):
                set_capacity(state, row, capacity)

    def shrink(self) -> None:
        rows = self.rng.sample(range(STATES), self.rng.randrange(STATES + 1))
        capacities = [self.rng.randrange(6, CAPACITY + 1) for _ in rows]
        moves = shrink_rows(
            self.bank,
            torch.tensor(rows, dtype=torch.int64),
            torch.tensor(capacities, dtype=torch.int32),
        )
        for state, of_group in zip(self.single, moves, strict=True):
            said = []
            for row, capacity in zip(rows, capacities, strict=True):
                if capacity < int(state.capacity[row]):
                    pairs = set_capacity(state, row, capacity).tolist()
                    said += [(row, source, target) for source, target in pairs]
            found = zip(
                of_group.row.tolist(),
                of_group.source.tolist(),
                of_group.target.tolist(),
                strict=True,
            )
            assert sorted(found) == sorted(said)

    def forget(self) -> None:
        written = [
            (row, range(first, first + self.rng.randrange(8)))
            for row in [-1, *self.rng.sample(range(STATES), 3)]
            for first in [self.rng.randrange(-3, POSITIONS)]
        ]
        rows = [row for row, run in written for _ in run]
        positions = [position for _, run in written for position in run]
        self.bank.forget(torch.tensor(rows), torch.tensor(positions))
        for state in self.single:
            invalidate(state, torch.tensor(rows), torch.tensor(positions))

    def compare(self) -> None:
        for group, state in enumerate(self.single):
            for name, word in vars(state).items():
                if isinstance(word, torch.Tensor):
                    found = getattr(self.bank.states[group], name)
                    assert torch.equal(found, word), f"group {group}: {name}"


@pytest.fixture(scope="module")
def twins() -> Twins:
    return Twins()


def test_random_upkeep_of_many_rows_equals_upkeep_row_by_row(twins: Twins) -> None:
    changes: list[Callable[[], None]] = [twins.begin, twins.grow, twins.shrink, twins.forget]
    twins.begin()
    for _ in range(250):
        for _ in range(3):
            twins.step()
        twins.rng.choice(changes)()
        twins.compare()
    assert int(twins.bank.states[0].octile.sum()) > 0


def test_counters_of_past_owners_are_kept() -> None:
    twins = Twins()
    twins.begin()
    counted = torch.zeros(GROUPS, 6, dtype=torch.int64)
    for _ in range(20):
        before = torch.stack([state.counters.sum(dim=0) for state in twins.single])
        twins.step()
        counted += torch.stack([state.counters.sum(dim=0) for state in twins.single]) - before
        twins.begin()
    live = twins.bank.arrays["counters"][:, :STATES].sum(dim=1)
    assert torch.equal(twins.bank.retired + live, counted)
    assert int(counted[0, 3]) > 0


def test_a_forgotten_bank_keeps_owners_and_counters() -> None:
    twins = Twins()
    twins.begin()
    twins.step()
    kept = {name: twins.bank.arrays[name].clone() for name in ("capacity", "step", "counters")}
    twins.bank.forget_all()
    assert (twins.bank.states[1].slot_pos == -1).all()
    for name, words in kept.items():
        assert torch.equal(twins.bank.arrays[name], words), name


def test_states_are_contiguous_parts_of_the_bank() -> None:
    bank = StateBank.create(2, 3, 8, 40)
    for state in bank.states:
        assert all(word.is_contiguous() for word in vars(state).values() if torch.is_tensor(word))
    bank.arrays["capacity"][1, 2] = 7
    assert bank.states[1].capacity.tolist() == [0, 0, 7]


def test_bytes_of_a_bank_are_told_before_it_is_made() -> None:
    from hisparsed.kernels.triton_workspace import sizes_for

    bank = StateBank.create(2, 3, 64, 640)
    taken = sum(word.nbytes for word in bank.arrays.values())
    shared = 4 * sum(sizes_for(bank.states[0], rows=1500, width=7).values())
    assert state_bytes(2, 3, 64, 640, rows=1500, topk=7) == (taken, shared)


@pytest.mark.parametrize("positions", [131_072, 1_048_576])
@pytest.mark.parametrize(("multiple", "most_mb"), [(2, 100), (5, 150)])
def test_state_of_64_requests_is_small_whatever_their_longest_context(
    positions: int, multiple: int, most_mb: int
) -> None:
    """GLM-5.x: 22 index groups, top-k 2048; four rows per request with three drafts."""
    rows = 64 * (1 if multiple == 2 else 4)
    bank, shared = state_bytes(22, 64, 2048 * multiple, positions, rows=rows, topk=2048)
    assert (bank + shared) / 1e6 <= most_mb


@pytest.mark.parametrize(("groups", "states"), [(0, 1), (1, 0)])
def test_an_empty_bank_is_refused(groups: int, states: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        StateBank.create(groups, states, 8, 40)
