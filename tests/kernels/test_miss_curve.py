"""Predicted against measured: exact below the capacity, close above it."""

from __future__ import annotations

import random

import pytest
import torch
from lockstep import BACKENDS

from hisparsed.kernels.api import (
    Geometry,
    ResolverState,
    miss_ratio_curve,
    request_miss_curves,
    reset,
    resolve,
    set_capacity,
)

pytestmark = pytest.mark.usefixtures("cpp_is_built")

POSITIONS = 4096
UNION = 32
GEOMETRY = Geometry(64, 64, 2000, 2000)


def drifting_steps(seed: int, steps: int) -> list[list[int]]:
    """Top-k rows that overlap from step to step and return to old places, as indexers do."""
    rng = random.Random(seed)
    heat = [min(rng.paretovariate(0.7), 200.0) for _ in range(POSITIONS)]
    rows: list[list[int]] = []
    current = set(rng.sample(range(POSITIONS), UNION))
    for _ in range(steps):
        kept = rng.sample(sorted(current), UNION * 3 // 4)
        fresh: set[int] = set(kept)
        while len(fresh) < UNION:
            fresh.update(rng.choices(range(POSITIONS), heat, k=UNION - len(fresh)))
        current = fresh
        rows.append(sorted(fresh))
    return rows


def run(
    steps: list[list[int]], capacity: int, backend: str = "cpp", **options: int
) -> ResolverState:
    state = ResolverState.create(1, 2048, POSITIONS, **options)
    reset(state, 0, capacity=capacity)
    source = torch.arange(1, POSITIONS // 64 + 1, dtype=torch.int32).view(1, -1)
    hot = torch.arange(100, 132, dtype=torch.int32).view(1, -1)
    zero = torch.zeros(1, dtype=torch.int32)
    for row in steps:
        topk = torch.tensor([row], dtype=torch.int32)
        state.begin_step()
        resolve(
            state,
            GEOMETRY,
            topk,
            zero,
            zero,
            source,
            torch.zeros_like(source),
            hot,
            backend=backend,
        )
    return state


def measured(state: ResolverState) -> float:
    _, _, hits, loads, spills, dropped = state.counters[0].tolist()
    assert spills == dropped == 0
    return loads / (hits + loads)


@pytest.mark.parametrize(
    "capacity", [300, *(pytest.param(one, marks=pytest.mark.long) for one in (256, 1024))]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ratios_at_seven_smaller_capacities_are_exact(backend: str, capacity: int) -> None:
    steps = drifting_steps(capacity, 300)
    curve = miss_ratio_curve(run(steps, capacity, backend, sample_period=1), 0)
    assert curve is not None
    exact = [rows for rows in curve.capacities if rows <= capacity]
    assert len(exact) == 8
    for rows, predicted in zip(curve.capacities, curve.miss_ratios, strict=False):
        if rows <= capacity:
            assert predicted == pytest.approx(measured(run(steps, rows)), abs=1e-12), rows
    assert curve.exact_to == capacity
    assert curve.samples == 300 * UNION


@pytest.mark.parametrize("backend", BACKENDS)
def test_shrunk_cache_holds_exactly_what_a_smaller_one_would(backend: str) -> None:
    steps = drifting_steps(3, 200)
    shrunk = run(steps, 1024, backend)
    set_capacity(shrunk, 0, 200)
    small = run(steps, 200, backend)
    for state in (shrunk, small):
        assert int((state.slot_pos[0] >= 0).sum()) == 200
    assert torch.equal(shrunk.slot_pos[0].sort().values, small.slot_pos[0].sort().values)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ghosts_estimate_larger_capacities_within_two_points(seed: int) -> None:
    steps = drifting_steps(seed, 1000)
    curve = miss_ratio_curve(run(steps, 256, sample_period=1, ghost_every=8), 0)
    assert curve is not None
    above = {
        rows: ratio
        for rows, ratio in zip(curve.capacities, curve.miss_ratios, strict=True)
        if rows > 256
    }
    assert set(above) == set(range(384, 2049, 128))
    for rows in (512, 1024, 2048):
        assert above[rows] == pytest.approx(measured(run(steps, rows)), abs=0.02), rows


def test_no_curve_before_the_first_sample_and_after_a_new_capacity() -> None:
    state = run(drifting_steps(5, 15), 256, sample_period=16)
    assert miss_ratio_curve(state, 0) is None
    state = run(drifting_steps(5, 16), 256, sample_period=16)
    assert miss_ratio_curve(state, 0) is not None
    set_capacity(state, 0, 512)
    assert miss_ratio_curve(state, 0) is None
    with pytest.raises(IndexError, match="state row 1 does not exist"):
        miss_ratio_curve(state, 1)


def test_curves_of_requests_are_pooled_over_index_groups_by_what_each_selected() -> None:
    groups = [run(drifting_steps(seed, 200), 256) for seed in (3, 4)]
    (pooled,) = request_miss_curves(groups, [0])
    parts = [miss_ratio_curve(state, 0) for state in groups]
    assert pooled is not None
    assert pooled.samples == sum(part.samples for part in parts if part is not None)
    for index, _ in enumerate(pooled.capacities[:8]):
        missed = sum(part.samples * part.miss_ratios[index] for part in parts if part is not None)
        assert pooled.miss_ratios[index] == pytest.approx(missed / pooled.samples)


def test_groups_of_different_capacity_have_no_curve_together() -> None:
    groups = [run(drifting_steps(seed, 20), 256) for seed in (3, 4)]
    set_capacity(groups[0], 0, 128)
    assert request_miss_curves(groups, [0]) == [None]
