"""A worker that shuts down lets go of the host pool: a mapped file that closes only then."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from hot_worker import BLOCK, HOST_BLOCKS, WIDTH, HotWorker
from no_cuda import two_hot_groups, without_cuda

from hisparsed.engine.cuda.hisparse_connector import HiSparseConnector
from hisparsed.engine.cuda.residency.leases import LeaseNews


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    two_hot_groups(monkeypatch)


class Worker:
    """As vLLM's: its shutdown closes the pool, and it keeps views of it until then."""

    def __init__(self, pool: mmap.mmap, views: tuple[torch.Tensor, ...]) -> None:
        self.pool = pool
        self.host_caches = views

    def shutdown(self) -> None:
        self.pool.close()


def view_of(pool: mmap.mmap) -> torch.Tensor:
    """As vLLM maps its region."""
    return torch.frombuffer(memoryview(pool), dtype=torch.uint8)


def mapped_worker() -> tuple[HotWorker, mmap.mmap]:
    """Hot buffers over a mapped pool, one for all layers."""
    worker = HotWorker(seed=1)
    pool = mmap.mmap(-1, HOST_BLOCKS * BLOCK * WIDTH)
    for group in worker.node.groups:
        rows = view_of(pool)
        group.layers = tuple(replace(layer, host=rows) for layer in group.layers)
    return worker, pool


def connector_of(node: Any, worker: Worker | None) -> Any:
    connector: Any = object.__new__(HiSparseConnector)
    connector._hisparsed_node = node
    connector.connector_worker = worker
    return connector


def test_the_pool_closes_at_shutdown() -> None:
    worker, pool = mapped_worker()
    with pytest.raises(BufferError):
        pool.close()
    connector_of(worker.node, Worker(pool, (view_of(pool),))).shutdown()
    assert pool.closed


def test_what_was_released_serves_no_further_step_and_keeps_its_figures() -> None:
    worker, pool = mapped_worker()
    row_bytes = [group.row_bytes for group in worker.node.groups]
    worker.node.release()
    pool.close()
    assert [group.row_bytes for group in worker.node.groups] == row_bytes
    assert min(row_bytes) > 0
    with pytest.raises(RuntimeError, match="this worker has been shut down"):
        worker.node.before_forward(LeaseNews((), ()), (), None)


def test_the_schedulers_side_has_nothing_to_release() -> None:
    connector_of(None, None).shutdown()
