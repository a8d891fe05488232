"""The GPU part of the benchmark: resolve and gather apart, each as the replay of a CUDA graph.

A graph holds all steps of a case, so that launches cost what they cost in a captured decode step
and the hot buffers are warm. Needs a CUDA device; other parts of the benchmark do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hisparsed.kernels.api import (
    Resolution,
    ResolverState,
    RowLayout,
    gather,
    raise_errors,
    reset,
    resolve,
)
from tests.bench.kernels_work import BLOCK, CONTEXT, Case, Inputs, make_inputs, miss_ratio

ROW_BYTES = 656
CASES = tuple(
    Case(k=2048, capacity=capacity, q=q, requests=requests)
    for capacity in (2048, 4096, 5120, 16384)
    for requests in (1, 8, 64)
    for q in (1, 4)
)


def measure(steps: int, repeats: int) -> list[dict[str, Any]]:
    """One row per case: microseconds of a step's resolve and gather, and what gather moved."""
    return [measure_case(case, steps, repeats) for case in CASES]


def measure_case(case: Case, steps: int, repeats: int) -> dict[str, Any]:
    device = torch.device("cuda")
    inputs = on_device(make_inputs(case, steps, seed=1), device)
    state = fresh_state(case, device)
    rows = case.requests * case.q
    outs = [Resolution.create(rows, case.k, device=device) for _ in inputs.steps]

    def resolve_all() -> None:
        for topk, out in zip(inputs.steps, outs, strict=True):
            step(state, inputs, topk, out)

    resolve_us = replay_us(resolve_all, repeats) / steps
    host, slab, layout = memories(inputs, device)

    def gather_all() -> None:
        for out in outs:
            gather(host, slab, layout, out.swap_host, out.swap_physical, out.swap_counts)

    gather_us = replay_us(gather_all, repeats) / steps
    raise_errors(device)
    moved = sum(int(out.swap_counts.sum()) for out in outs) * ROW_BYTES / steps
    return {
        "capacity": case.capacity,
        "requests": case.requests,
        "q": case.q,
        "resolve_us": resolve_us,
        "gather_us": gather_us,
        "gather_gb_per_s": moved / gather_us / 1e3,
        "miss_ratio": miss_ratio(state),
    }


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    return replace(
        inputs,
        steps=[topk.to(device) for topk in inputs.steps],
        request_ids=inputs.request_ids.to(device),
        states=inputs.states.to(device),
        source=inputs.source.to(device),
        resident=inputs.resident.to(device),
        hot=inputs.hot.to(device),
    )


def fresh_state(case: Case, device: torch.device) -> ResolverState:
    state = ResolverState.create(case.requests, case.capacity, CONTEXT, device=device)
    for row in range(case.requests):
        reset(state, row, capacity=case.capacity)
    return state


def step(state: ResolverState, inputs: Inputs, topk: torch.Tensor, out: Resolution) -> None:
    """One step; a node counts it once for all its groups, here that is a launch of each."""
    state.begin_step()
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
    )


def memories(inputs: Inputs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, RowLayout]:
    """A pinned host pool, a slab, and the layout of their single layer."""
    page = BLOCK * ROW_BYTES
    geometry = inputs.geometry
    host = torch.zeros(geometry.host_blocks * page, dtype=torch.uint8, pin_memory=True)
    slab = torch.zeros(geometry.slab_blocks * page, dtype=torch.uint8, device=device)
    return host, slab, RowLayout(BLOCK, ROW_BYTES, page, page, (0,), (0,))


def replay_us(action: Callable[[], None], repeats: int) -> float:
    """Microseconds of the fastest replay of ``action``, captured after it ran once eagerly."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    graph.replay()
    return min(_timed_us(graph.replay) for _ in range(repeats))


def _timed_us(action: Callable[[], None]) -> float:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'capacity':>8} {'requests':>8} {'q':>2} {'resolve us':>10} {'gather us':>9} "
        f"{'GB/s':>6} miss"
    ]
    lines += [
        f"{row['capacity']:8} {row['requests']:8} {row['q']:2} {row['resolve_us']:10.1f} "
        f"{row['gather_us']:9.1f} {row['gather_gb_per_s']:6.1f} {row['miss_ratio']:6.1%}"
        for row in rows
    ]
    return "\n".join(lines)
