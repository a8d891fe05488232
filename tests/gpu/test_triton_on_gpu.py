"""The Triton backend on a GPU at full size: the C++ backend's integers, in graphs too.

Needs a CUDA device and is skipped elsewhere, where test_triton.py interprets and compiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparsed.kernels.api import (
    Resolution,
    ResolverState,
    gather,
    raise_errors,
    resolve,
    set_capacity,
)
from tests.bench import kernels_gpu
from tests.bench.kernels_work import Case, Inputs, make_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CPU = torch.device("cpu")
SCRATCH = 4
STATE = (
    "slot_pos",
    "slot_stamp",
    "step",
    "counters",
    "octile",
    "octile_misses",
    "ghost_pos",
    "ghost",
    "clock",
)


def run_step(state: ResolverState, inputs: Inputs, step: int, backend: Any) -> Resolution:
    """One step whose scratch blocks lie behind the hot blocks."""
    hot = inputs.hot
    first = int(hot.max()) + 1
    scratch = torch.arange(first, first + SCRATCH, dtype=torch.int32, device=hot.device)
    state.begin_step()
    return resolve(
        state,
        inputs.geometry,
        inputs.steps[step],
        inputs.request_ids,
        inputs.states,
        inputs.source,
        inputs.resident,
        hot,
        scratch,
        backend=backend,
    )


def assert_same(found: Resolution, expected: Resolution, states: list[ResolverState]) -> None:
    for name in ("physical_rows", "attention_indices", "valid_counts", "miss_mask", "swap_counts"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    listed = torch.arange(expected.topk) < expected.swap_counts.unsqueeze(1)
    for name in ("swap_host", "swap_physical"):
        assert torch.equal(getattr(found, name).cpu()[listed], getattr(expected, name)[listed]), (
            name
        )
    for name in STATE:
        assert torch.equal(getattr(states[0], name).cpu(), getattr(states[1], name)), name


@pytest.mark.parametrize("case", kernels_gpu.CASES, ids=str)
def test_full_size_steps_equal_the_cpp_backend(case: Case) -> None:
    device = torch.device("cuda")
    inputs = make_inputs(case, steps=20, seed=7)
    inputs.resident[:, 3::7] = inputs.hot[:, :1]
    on_gpu = kernels_gpu.on_device(inputs, device)
    states = [kernels_gpu.fresh_state(case, where) for where in (device, CPU)]
    for step in range(20):
        if step in (8, 14):
            capacity = case.capacity // 2 if step == 8 else case.capacity
            moves = [set_capacity(state, 0, capacity).cpu() for state in states]
            assert torch.equal(*moves)
        found = run_step(states[0], on_gpu, step, "triton")
        raise_errors(device)
        assert_same(found, run_step(states[1], inputs, step, "cpp"), states)


def test_ten_thousand_small_steps_equal_the_cpp_backend() -> None:
    device = torch.device("cuda")
    case = Case(k=64, capacity=160, q=2, requests=8)
    states = [kernels_gpu.fresh_state(case, where) for where in (device, CPU)]
    for seed in range(20):
        inputs = make_inputs(case, steps=500, seed=seed)
        on_gpu = kernels_gpu.on_device(inputs, device)
        for step in range(500):
            found = run_step(states[0], on_gpu, step, "triton")
            assert_same(found, run_step(states[1], inputs, step, "cpp"), states)
    raise_errors(device)


def test_replayed_graph_equals_eager_steps_and_allocates_nothing() -> None:
    device = torch.device("cuda")
    case = Case(k=2048, capacity=4096, q=4, requests=8)
    inputs = make_inputs(case, steps=10, seed=3)
    on_gpu = kernels_gpu.on_device(inputs, device)
    states = [kernels_gpu.fresh_state(case, where) for where in (device, CPU)]
    topk = on_gpu.steps[0].clone()
    out = Resolution.create(*topk.shape, device=device)
    kernels_gpu.step(states[0], on_gpu, topk, out)
    kernels_gpu.step(states[1], inputs, inputs.steps[0], Resolution.create(*topk.shape))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels_gpu.step(states[0], on_gpu, topk, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for step in range(1, 10):
        topk.copy_(on_gpu.steps[step])
        graph.replay()
        expected = Resolution.create(*topk.shape)
        kernels_gpu.step(states[1], inputs, inputs.steps[step], expected)
        assert_same(out, expected, states)


def test_gather_reads_pinned_rows() -> None:
    device = torch.device("cuda")
    case = Case(k=2048, capacity=4096, q=1, requests=2)
    inputs = make_inputs(case, steps=1, seed=5)
    on_gpu = kernels_gpu.on_device(inputs, device)
    host, slab, layout = kernels_gpu.memories(inputs, device)
    host.view(torch.int32).random_(generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(slab, device=CPU)
    # A cold request next to a fully resident one: all copies come from one row.
    on_gpu.resident[1] = 1
    out = run_step(kernels_gpu.fresh_state(case, device), on_gpu, 0, "triton")
    assert out.swap_counts.tolist() == [2048, 0]
    swaps = (out.swap_host, out.swap_physical, out.swap_counts)
    gather(host, slab, layout, *swaps)
    raise_errors(device)
    gather(host, expected, layout, *(swap.cpu() for swap in swaps), backend="torch")
    assert torch.equal(slab.cpu(), expected)


def test_wrong_values_wait_for_whoever_asks() -> None:
    device = torch.device("cuda")
    case = Case(k=64, capacity=128, q=1, requests=2)
    inputs = kernels_gpu.on_device(make_inputs(case, steps=1, seed=5), device)
    inputs.hot[1, 1] = 0
    out = run_step(kernels_gpu.fresh_state(case, device), inputs, 0, "triton")
    assert out.valid_counts.tolist() == [64, 0]
    with pytest.raises(ValueError, match="state row 1: capacity 128 needs 2 hot blocks"):
        raise_errors(device)
    raise_errors(device)
