"""Our resolver behind vLLM's runtimes on a GPU: eager and as a replayed graph, every byte right.

The miniature worker of tests/engine/cuda, with CUDA tensors, real streams and pinned host memory.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from hot_worker import LEASE_BLOCKS, REQUESTS, HotWorker, two_hot_groups
from vllm.v1.hisparse import runtime as vllm_runtime


@pytest.fixture(autouse=True)
def vllms_runtime_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled operators are not called, and no model's forward is under way."""
    two_hot_groups(monkeypatch)
    monkeypatch.setattr(vllm_runtime, "_has_hisparse_ops", lambda: True)
    monkeypatch.setattr(vllm_runtime, "in_piecewise_cudagraph", lambda: False)


@pytest.mark.parametrize(("query_len", "scratch"), [(1, 0), (3, 13)])
def test_every_row_that_attention_reads_is_right_while_leases_move(
    query_len: int, scratch: int
) -> None:
    worker = HotWorker(seed=3, device="cuda", query_len=query_len, scratch_blocks=scratch)
    began, moved = worker.live(steps=200)
    assert began > 8
    assert moved > 20
    assert worker.node.failed == ""


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_replayed_step_follows_leases_that_move_between_replays(query_len: int) -> None:
    worker = HotWorker(seed=4, device="cuda", query_len=query_len)
    for at in range(REQUESTS):
        worker.start(f"r{at}", tokens=30 + at, hot_blocks=7)
    names = worker.step_batch()
    worker.decode(names)
    chosen = torch.tensor(worker.selection(names), dtype=torch.int32, device="cuda")
    request_ids = worker.batch_rows(names)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for handle in worker.handles.values():
            handle.runtime.begin_forward()
        found = worker.forward(names, chosen, request_ids)
    worker.node.forget_all()
    moved = 0
    for step in range(120):
        names = worker.step_batch()
        topk = worker.selection(names)
        chosen.copy_(torch.tensor(topk, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        worker.check(names, topk, found)
        name = worker.rng.choice(names)
        held = len(worker.requests[name].hot[0])
        if step % 2 and held > worker.least_blocks:
            moved += worker.resize({name: worker.rng.randrange(worker.least_blocks, held)})
        elif held < LEASE_BLOCKS:
            worker.grow(name, worker.rng.randint(1, LEASE_BLOCKS - held))
    assert moved > 20
    worker.node.report({})
    torch.cuda.synchronize()
    worker.node.report({})
    assert worker.node.failed == ""
