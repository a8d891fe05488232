"""Random walks and hypothesis steps: the oracle and every backend agree in every word."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep import INTERPRETED, Lockstep, Shape

from tests.examples import examples

pytestmark = pytest.mark.usefixtures("cpp_is_built")

QUICK = 1 if INTERPRETED else 2
WALKS, STEPS = (8, 8) if INTERPRETED else (20, 550)
EXAMPLES = examples(4, 8) if INTERPRETED else examples(30, 150)
"""11,000 random steps in total; Triton's interpreter needs a tenth of a second for each."""


class Walk:
    """One random node: requests come and go, pages turn resident, capacities change."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.shape = Shape(
            states=rng.choice([1, 3, 5]),
            capacity=rng.choice([1, 7, 16, 24]),
            positions=rng.choice([17, 64, 130]),
            block_size=rng.choice([1, 3, 4, 8]),
            topk=rng.choice([1, 4, 9]),
            stride=rng.choice([8, 13]),
            sample_period=rng.choice([1, 3]),
            ghost_every=rng.choice([1, 2, 8]),
            resident_by_state=rng.random() < 0.5,
            index_dtype=rng.choice([torch.int32, torch.int64]),
        )
        self.world = Lockstep(self.shape)
        self.clock = 0
        shape = self.shape
        self.source = [self.blocks(shape.pages, shape.host_blocks + 5, 0.1) for _ in self.states()]
        self.resident = [self.blocks(shape.pages, shape.slab_blocks, 0.7) for _ in self.states()]
        self.hot = [self.blocks(shape.hot_blocks, shape.slab_blocks, 0.0) for _ in self.states()]
        for row in self.states():
            self.world.reset(row, rng.randint(0, shape.capacity))

    def states(self) -> range:
        return range(self.shape.states)

    def blocks(self, count: int, limit: int, nulls: float) -> list[int]:
        rng = self.random
        return [
            rng.choice([0, -1]) if rng.random() < nulls else rng.randint(1, limit - 1)
            for _ in range(count)
        ]

    def disturb(self) -> None:
        rng, shape = self.random, self.shape
        row = rng.randrange(shape.states)
        match rng.randrange(5):
            case 0:
                self.world.set_capacity(row, rng.randint(0, shape.capacity))
            case 1:
                pairs = [
                    (rng.randint(-1, shape.states - 1), rng.randint(-1, shape.positions + 3))
                    for _ in range(rng.randrange(6))
                ]
                self.world.invalidate(pairs)
            case 2:
                self.world.reset(row, rng.randint(0, shape.capacity))
                self.source[row] = self.blocks(shape.pages, shape.host_blocks + 5, 0.1)
            case 3:
                self.resident[row] = self.blocks(
                    shape.pages, shape.slab_blocks, rng.choice([0.0, 0.5, 1.0])
                )
            case 4:
                self.hot[row] = self.blocks(shape.hot_blocks, shape.slab_blocks, 0.0)

    def position(self, centre: int) -> int:
        rng = self.random
        if rng.random() < 0.1:
            return rng.choice([-1, self.shape.positions, self.shape.positions + 40])
        spread = rng.choice([4, self.shape.positions])
        return max(-1, min(self.shape.positions + 5, centre + rng.randint(-spread, spread)))

    def step(self) -> None:
        rng, shape = self.random, self.shape
        states = [*self.states(), -1]
        rng.shuffle(states)
        request_ids: list[int] = []
        requests = list(range(len(states)))
        rng.shuffle(requests)
        for request in requests:
            request_ids += [rng.choice([request] * 6 + [-1])] * rng.randint(0, 3)
        topk = []
        for _ in request_ids:
            self.clock += 1
            centre = self.clock // 8 % shape.positions
            topk.append([self.position(centre) for _ in range(shape.topk)])
        if not topk:
            return
        by_request = [max(state, 0) for state in states]
        resident = [self.resident[state] for state in by_request]
        scratch = rng.choice([None, [], [0, 5], [3001], [3001, 3002, 0, 3003]])
        self.world.step(
            topk,
            request_ids,
            states,
            [self.source[state] for state in by_request],
            self.resident if shape.resident_by_state else resident,
            [self.hot[state] for state in by_request],
            scratch,
        )


@pytest.mark.parametrize(
    "seed",
    [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(QUICK, WALKS))],
)
def test_random_walk_agrees_word_for_word(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(STEPS):
        if walk.random.random() < 0.2:
            walk.disturb()
        walk.step()
    assert sum(row.counters["references"] for row in walk.world.oracle.rows) > 0


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    capacity = draw(st.integers(0, 8))
    steps = draw(
        st.lists(
            st.lists(st.lists(st.integers(-1, 20), min_size=4, max_size=4), min_size=1, max_size=3),
            min_size=1,
            max_size=6,
        )
    )
    resident = draw(st.lists(st.sampled_from([0, 0, 9]), min_size=10, max_size=10))
    source = draw(st.lists(st.sampled_from([0, 3, 4, 5, 6]), min_size=10, max_size=10))
    scratch = draw(st.sampled_from([None, [50], [50, 51]]))
    resize = draw(st.lists(st.integers(0, 8), min_size=6, max_size=6))
    return {
        "capacity": capacity,
        "steps": steps,
        "resident": resident,
        "source": source,
        "scratch": scratch,
        "resize": resize,
    }


@pytest.mark.examples
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(scenarios())
def test_any_short_history_agrees(scenario: dict[str, Any]) -> None:
    world = Lockstep(
        Shape(states=1, capacity=8, positions=20, block_size=2, topk=4, sample_period=1)
    )
    world.reset(0, scenario["capacity"])
    for topk, capacity in zip(scenario["steps"], scenario["resize"], strict=False):
        world.step(
            topk,
            [0] * len(topk),
            [0],
            [scenario["source"]],
            [scenario["resident"]],
            [[10, 11, 12, 13]],
            scenario["scratch"],
        )
        world.set_capacity(0, capacity)
