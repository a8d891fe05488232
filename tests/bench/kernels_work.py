"""Work for the benchmark: drifting top-k sets, tables, and timing that survives a noisy machine.

Every figure is a sum or a mean of per-step minima over repetitions of the same steps, so that
what is compared did the same work and interruptions drop out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hisparsed.kernels.api import Backend, Geometry, Resolution, ResolverState, reset, resolve

Seconds = npt.NDArray[np.float64]

BLOCK = 64
CONTEXT = 65536
"""Positions of one request."""
_KEPT = 0.8
"""Share of a step's top-k that the step before had as well; the rest comes from hot places."""


@dataclass(frozen=True)
class Case:
    """One size to measure: ``requests`` requests of ``q`` rows of top-k ``k``."""

    k: int
    capacity: int
    q: int
    requests: int


@dataclass(frozen=True)
class Inputs:
    steps: Sequence[torch.Tensor]
    """int32 [requests * q, k] each."""
    request_ids: torch.Tensor
    states: torch.Tensor
    source: torch.Tensor
    resident: torch.Tensor
    hot: torch.Tensor
    geometry: Geometry


def make_inputs(case: Case, steps: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    rows = case.requests * case.q
    heat = np.minimum(rng.pareto(0.8, CONTEXT) + 1, 500.0)
    heat /= heat.sum()
    current = [rng.choice(CONTEXT, case.k, replace=False, p=heat) for _ in range(rows)]
    sets = []
    for _ in range(steps):
        for row in range(rows):
            leader = current[row - row % case.q]
            kept = rng.choice(leader, int(case.k * _KEPT), replace=False)
            fresh = rng.choice(CONTEXT, 2 * case.k, replace=False, p=heat)
            fresh = fresh[~np.isin(fresh, kept)]
            current[row] = np.concatenate((kept, fresh[: case.k - kept.size]))
        sets.append(torch.from_numpy(np.sort(np.stack(current), axis=1).astype(np.int32)))
    pages = CONTEXT // BLOCK
    hot_blocks = -(-case.capacity // BLOCK)
    requests = torch.arange(case.requests, dtype=torch.int32)
    return Inputs(
        steps=sets,
        request_ids=requests.repeat_interleave(case.q),
        states=requests,
        source=_table(case.requests, pages),
        resident=torch.zeros((case.requests, pages), dtype=torch.int32),
        hot=_table(case.requests, hot_blocks),
        geometry=Geometry(
            BLOCK, 320, case.requests * hot_blocks + 1, host_blocks=case.requests * pages + 1
        ),
    )


def _table(requests: int, blocks: int) -> torch.Tensor:
    return torch.arange(1, requests * blocks + 1, dtype=torch.int32).view(requests, blocks)


def run_steps(
    case: Case, inputs: Inputs, backend: Backend, *, sample_period: int
) -> tuple[Seconds, ResolverState]:
    """Seconds of every step on a fresh state, and that state."""
    state = ResolverState.create(case.requests, case.capacity, CONTEXT, sample_period=sample_period)
    for row in range(case.requests):
        reset(state, row, capacity=case.capacity)
    out = Resolution.create(case.requests * case.q, case.k)

    def run_step(topk: torch.Tensor) -> None:
        resolve(
            state,
            inputs.geometry,
            topk,
            inputs.request_ids,
            inputs.states,
            inputs.source,
            inputs.resident,
            inputs.hot,
            out=out,
            backend=backend,
        )

    seconds = []
    for topk in inputs.steps:
        state.begin_step()  # once a step of all groups, so not part of one
        seconds.append(timed(partial(run_step, topk)))
    return np.array(seconds), state


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def best_of(repeats: int, action: Callable[[], object]) -> float:
    return min(timed(action) for _ in range(repeats))


def miss_ratio(state: ResolverState) -> float:
    _, _, hits, loads, spills, dropped = state.counters.sum(dim=0).tolist()
    return float((loads + spills + dropped) / (hits + loads + spills + dropped))
