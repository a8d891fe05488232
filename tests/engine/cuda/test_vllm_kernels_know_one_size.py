"""What vLLM's own operator is told of a hot buffer's size: one number for all, fixed at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hot_worker import BLOCK, LAYERS, LEASE_BLOCKS, REQUESTS, TOPK, HotWorker
from no_cuda import UnpinnedTorch, without_cuda
from vllm.v1.hisparse import runtime as vllm_runtime

SIZE, UNION, POSITIONS, ORDER, TABLE = 8, 9, 5, 6, 2
"""Where the operator takes region stride, union bound, held rows, their order, hot blocks."""


class RecordingTorch(UnpinnedTorch):
    """torch whose HiSparse operators note what they are given and do nothing."""

    def __init__(self) -> None:
        self.resolved: list[tuple[Any, ...]] = []
        self.ops = SimpleNamespace(
            _C_cache_ops=SimpleNamespace(
                hisparse_resolve_residency=lambda *given: self.resolved.append(given),
                hisparse_gather_compact=lambda *given: None,
            )
        )


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingTorch:
    without_cuda(monkeypatch)
    recorded = RecordingTorch()
    monkeypatch.setattr(vllm_runtime, "torch", recorded)
    return recorded


def stock_worker(monkeypatch: pytest.MonkeyPatch) -> HotWorker:
    """The miniature worker, its runtimes left as vLLM made them."""
    monkeypatch.setattr("hot_worker.install", lambda *_, **__: SimpleNamespace())
    return HotWorker(seed=1)


def resolve(worker: HotWorker) -> None:
    for layer in LAYERS:
        handle = worker.handles[layer]
        handle.decode_batch = True
        handle.runtime.begin_forward()
        handle.swap_in(
            torch.zeros(1, dtype=torch.int32),
            worker.source,
            torch.zeros(1, TOPK, dtype=torch.int32),
            block_size=BLOCK,
            num_valid_rows=torch.ones(1),
        )


def test_the_operator_gets_one_size_whatever_a_request_has_leased(
    recording: RecordingTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stock_worker(monkeypatch)
    for blocks in (LEASE_BLOCKS, 2):
        worker.hot_input.zero_()
        worker.hot_input[:, 0, :blocks] = torch.arange(1, 1 + blocks)
        resolve(worker)
    assert len(recording.resolved) == 6, "three index groups, two steps"
    for given in recording.resolved:
        assert (given[SIZE], given[UNION]) == (LEASE_BLOCKS * BLOCK, TOPK)
        assert given[POSITIONS].shape == (REQUESTS, LEASE_BLOCKS * BLOCK)
        assert given[ORDER].shape == (REQUESTS, LEASE_BLOCKS * BLOCK)
        per_request = [one for one in given if torch.is_tensor(one) and one.shape == (REQUESTS,)]
        assert len(per_request) == 1, "only the state row is told request by request"


def test_slots_beyond_a_short_lease_would_be_used_all_the_same(
    recording: RecordingTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a state row names every slot of the one size, so blocks that went back too."""
    worker = stock_worker(monkeypatch)
    resolve(worker)
    order = recording.resolved[0][ORDER]
    assert sorted(order[0].tolist()) == list(range(LEASE_BLOCKS * BLOCK))
    assert recording.resolved[0][TABLE].shape[1] == LEASE_BLOCKS


def test_the_size_is_that_of_the_configuration(recording: RecordingTorch) -> None:
    """vLLM takes it from there when a layer is made, before KV blocks are counted."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            hisparse_config=SimpleNamespace(device_buffer_size=320, eager_host_mirror=True)
        ),
        speculative_config=None,
        num_speculative_tokens=0,
        uniform_decode_query_len=1,
    )
    resolved = vllm_runtime.ResolvedHiSparseConfig.from_vllm_config(config, 64)
    assert resolved.device_buffer_size == 320
    config.attention_config.hisparse_config.device_buffer_size = 63
    with pytest.raises(ValueError, match="must cover every decode query"):
        vllm_runtime.ResolvedHiSparseConfig.from_vllm_config(config, 64)
