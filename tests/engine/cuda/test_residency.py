"""Our resolver behind vLLM's own HiSparse runtimes, on CPU tensors: every byte read is right.

With the C++ backend, and with the Triton kernels interpreted. A worker that shuts down lets go
of the host pool: a mapped file that closes only then.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hot_worker import (
    BLOCK,
    HOST_BLOCKS,
    LAYERS,
    LEASE_BLOCKS,
    REQUESTS,
    TOPK,
    WIDTH,
    HotWorker,
    two_hot_groups,
    without_cuda,
)

from hisparsed.engine.cuda.residency import vllm_hooks
from hisparsed.engine.cuda.residency.runtime import installed
from hisparsed.engine.cuda.residency.vllm_hooks import HiSparseConnector
from hisparsed.engine.cuda.residency.worker import Lease, LeaseUpdates
from hisparsed.engine.scratch import whole_step_scratch_blocks


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    two_hot_groups(monkeypatch)


def counters(worker: HotWorker) -> dict[str, int]:
    row_of = {name: held.row for name, held in worker.requests.items()}
    worker.node.report(row_of)
    found: Any = worker.node.report(row_of)
    return dict(found["counters"])


@pytest.mark.parametrize("by_state", [True, False], ids=["0.32 tables", "0.31 tables"])
@pytest.mark.parametrize(("query_len", "scratch"), [(1, 0), (3, 0), (3, 13)])
def test_every_row_that_attention_reads_is_right_while_leases_move(
    by_state: bool, query_len: int, scratch: int
) -> None:
    worker = HotWorker(
        seed=query_len, by_state=by_state, query_len=query_len, scratch_blocks=scratch
    )
    began, moved = worker.live(steps=120)
    told = counters(worker)
    assert began > 8
    assert moved > 20, "rows must really have moved"
    assert told["dropped"] == 0
    assert told["loads"] > 500
    assert (told["spills"] > 0) is bool(scratch)
    assert worker.node.failed == ""


def test_a_lease_below_one_steps_rows_without_scratch_ends_the_engine() -> None:
    worker = HotWorker(seed=1, query_len=3)
    worker.start("r", tokens=40, hot_blocks=2)
    worker.step_batch()
    with pytest.raises(AssertionError):
        worker.decode(["r"])
    assert counters(worker)["dropped"] > 0
    with pytest.raises(RuntimeError, match="selected rows had no place in a step"):
        worker.step_batch()


def test_a_shrunk_request_keeps_what_it_used_last() -> None:
    worker = HotWorker(seed=2)
    worker.start("r", tokens=44, hot_blocks=10)
    for group in range(2):
        worker.requests["r"].resident[group] = [0] * 11
    for _ in range(6):
        worker.decode(worker.step_batch())
    last = worker.decode(worker.step_batch())[0]
    before = counters(worker)
    assert worker.resize({"r": 2}) > 0
    state = worker.node.bank.states[0]
    held = set(state.slot_pos[worker.requests["r"].row].tolist()) - {-1}
    assert {position for position in last if position >= 0} <= held
    assert len(held) == 2 * BLOCK
    assert counters(worker)["loads"] == before["loads"]


def test_a_grown_request_fills_its_new_blocks() -> None:
    worker = HotWorker(seed=2)
    worker.start("r", tokens=44, hot_blocks=2)
    for group in range(2):
        worker.requests["r"].resident[group] = [0] * 11
    for _ in range(6):
        worker.decode(worker.step_batch())
    row = worker.requests["r"].row
    held = (worker.node.bank.arrays["slot_pos"][:, row] >= 0).sum(dim=1)
    assert held.tolist() == [2 * BLOCK] * 3
    worker.grow("r", 6)
    for _ in range(30):
        worker.decode(worker.step_batch())
    held = (worker.node.bank.arrays["slot_pos"][:, row] >= 0).sum(dim=1)
    assert held.tolist() == [8 * BLOCK] * 3


def test_memories_that_vllm_made_for_inference_only_are_changed_all_the_same() -> None:
    """vLLM's steps run in that mode, worker calls do not."""
    with torch.inference_mode():
        worker = HotWorker(seed=2)
        worker.start("r", tokens=44, hot_blocks=10)
        for _ in range(6):
            worker.decode(worker.step_batch())
    moved = worker.ask_to_shrink({"r": 2})
    assert moved > 0
    with torch.inference_mode():
        worker.give_back("r", 2)
        worker.decode(worker.step_batch())


def test_shrinking_ends_the_workers_own_tables_too() -> None:
    worker = HotWorker(seed=3)
    worker.start("r", tokens=44, hot_blocks=9)
    worker.decode(worker.step_batch())
    worker.resize({"r": 3, "gone": 3})
    row = worker.requests["r"].row
    assert worker.num_blocks[:, row].tolist() == [3, 3]
    assert worker.node.bank.arrays["capacity"][:, row].tolist() == [3 * BLOCK] * 3


def test_a_shrink_that_failed_half_way_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler gives no block back then, but the worker may have moved rows already."""
    worker = HotWorker(seed=3)
    worker.start("r", tokens=44, hot_blocks=9)
    worker.decode(worker.step_batch())
    last = worker.node.groups[-1]

    def fails(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(last, "move", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        worker.ask_to_shrink({"r": 3})
    with pytest.raises(RuntimeError, match="shrinking hot buffers failed: the device is lost"):
        worker.step_batch()


def test_a_worker_that_is_told_of_doubt_serves_no_further_step() -> None:
    worker = HotWorker(seed=3)
    worker.start("r", tokens=44, hot_blocks=9)
    mixed = type("Worker", (vllm_hooks.HotExtension,), {})()
    mixed.hisparsed_doubt_hot("ranks differ")
    mixed.hisparsed_doubt_hot("and again")
    with pytest.raises(RuntimeError, match="hot buffers are in doubt: ranks differ"):
        worker.step_batch()


def test_a_written_row_is_loaded_again() -> None:
    """A rejected draft's row is written again: its hot copy holds the old row."""
    worker = HotWorker(seed=4)
    worker.start("q", tokens=30, hot_blocks=LEASE_BLOCKS)
    worker.start("r", tokens=44, hot_blocks=LEASE_BLOCKS)
    for held in worker.requests.values():
        held.resident = [[0] * len(held.host)] * 2
    for _ in range(12):
        names = worker.step_batch()
        worker.decode(names)
    at = names.index("r")
    held = worker.requests["r"]
    written = [21, 22, 23, 24, 25]
    slots = [held.host[position // BLOCK] * BLOCK + position % BLOCK for position in written]
    for layer in LAYERS:
        for position in written:
            worker.host[layer][held.host[position // BLOCK], position % BLOCK] += 1
    for handle in worker.handles.values():
        if handle.runtime.is_group_leader:
            handle.runtime.invalidate_written_slots(
                torch.tensor([0] * at + slots if at else [*slots, 0]),
                torch.tensor([0] * at + [at] * 5 if at else [0] * 5 + [1], dtype=torch.int32),
            )
    for state in worker.node.bank.states:
        assert set(written).isdisjoint(state.slot_pos[held.row].tolist())
        assert int((state.slot_pos[held.row] >= 0).sum()) > 10, "others stay"
    for _ in range(8):
        worker.decode(worker.step_batch())


def test_a_new_owner_of_a_state_row_finds_nothing_of_the_old_one() -> None:
    worker = HotWorker(seed=5)
    for at in range(REQUESTS):
        worker.start(f"old{at}", tokens=20, hot_blocks=6)
    worker.decode(worker.step_batch())
    before = counters(worker)
    names = tuple(worker.requests)
    for name in names:
        worker.end(name)
    for at in range(REQUESTS):
        worker.start(f"new{at}", tokens=20, hot_blocks=6)
    batch = worker.step_batch(ended=names)
    assert (worker.node.bank.arrays["slot_pos"][:, :REQUESTS] == -1).all()
    assert counters(worker) == before, "totals never go back"
    worker.decode(batch)


def test_after_a_graph_capture_nothing_is_held() -> None:
    worker = HotWorker(seed=6)
    worker.start("r", tokens=40, hot_blocks=6)
    names = worker.step_batch()
    worker.decode(names)
    worker.handles["c"].runtime.reset_hot_state()
    assert (worker.node.bank.arrays["slot_pos"] == -1).all()
    worker.decode(names)


def test_only_a_resize_may_shrink_a_running_request() -> None:
    worker = HotWorker(seed=7)
    worker.start("r", tokens=40, hot_blocks=6)
    worker.step_batch()
    with pytest.raises(RuntimeError, match=r"has \(5, 6\) hot blocks after \(6, 6\), but its rows"):
        worker.node.before_forward(LeaseUpdates((Lease("r", False, (5, 6)),)), ["r"], worker.states)


def test_figures_tell_each_requests_curve_and_rows() -> None:
    worker = HotWorker(seed=8)
    worker.start("r", tokens=44, hot_blocks=5)
    worker.start("s", tokens=40, hot_blocks=3)
    for _ in range(400):
        worker.decode(worker.step_batch())
    row_of = {name: held.row for name, held in worker.requests.items()} | {"unknown": 3}
    assert worker.node.report(row_of) is None, "the first copy has only begun"
    found: Any = worker.node.report(row_of)
    assert set(found["rows"]) == {"r", "s"}
    assert found["rows"]["r"][0] == 3 * 5 * BLOCK, "capacity, over three index groups"
    assert found["request_curves"].keys() == {"r", "s"}
    rows, misses = zip(*found["request_curves"]["r"], strict=True)
    assert list(rows) == sorted(rows)
    assert 5 * BLOCK in rows
    assert list(misses) == sorted(misses, reverse=True)
    # Bytes: layers a and b move together, c and d alone.
    assert found["counters"]["h2d_bytes"] == _bytes_moved(worker)


def test_a_curve_counts_the_rows_of_its_own_request_only() -> None:
    """A state row's steps continue under a new owner; its loads per step do not."""
    worker = HotWorker(seed=8)
    worker.start("old", tokens=44, hot_blocks=5)
    for _ in range(300):
        worker.decode(worker.step_batch())
    row = worker.requests["old"].row
    worker.free_rows.clear()
    worker.end("old")
    worker.start("new", tokens=44, hot_blocks=5)
    assert worker.requests["new"].row == row
    batch = worker.step_batch(ended=("old",))
    for _ in range(300):
        worker.decode(batch)
        batch = worker.step_batch()
    worker.node.report({"new": row})
    found: Any = worker.node.report({"new": row})
    loads = sum(int(state.counters[row, 3]) for state in worker.node.bank.states)
    misses = dict(found["request_curves"]["new"])[5 * BLOCK]
    assert misses == pytest.approx(loads / 300, rel=0.3)


def _bytes_moved(worker: HotWorker) -> int:
    loads = [int(state.counters[:, 3].sum()) for state in worker.node.bank.states]
    return loads[0] * 32 + loads[1] * 16 + loads[2] * 16


def test_scratch_must_hold_the_worst_step_of_all_requests() -> None:
    with pytest.raises(ValueError, match=r"scratch has 8 rows, and 4 requests may need 48"):
        HotWorker(seed=9, query_len=3, scratch_blocks=2)


def test_what_the_launch_takes_for_a_whole_step_is_what_a_worker_needs() -> None:
    blocks = whole_step_scratch_blocks(
        query_len=3, topk=TOPK, block_tokens=BLOCK, max_num_seqs=REQUESTS
    )
    HotWorker(seed=9, query_len=3, scratch_blocks=blocks)
    with pytest.raises(ValueError, match="give as many, or none"):
        HotWorker(seed=9, query_len=3, scratch_blocks=blocks - 1)


def test_the_newest_worker_is_the_one_that_is_asked() -> None:
    worker = HotWorker(seed=10)
    assert installed() is worker.node


def test_a_worker_of_vllms_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from hisparsed.engine.cuda.residency import runtime

    monkeypatch.setattr(runtime, "_installed", [])
    mixed = type("Worker", (vllm_hooks.HotExtension,), {})()
    mixed.model_runner = SimpleNamespace()
    with pytest.raises(RuntimeError, match="vLLM's own HiSparse kernels"):
        mixed.hisparsed_hot_figures()


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
        worker.node.before_forward(LeaseUpdates((), ()), (), None)


def test_the_schedulers_side_has_nothing_to_release() -> None:
    connector_of(None, None).shutdown()


HERE = Path(__file__).parent


@pytest.mark.long
def test_the_triton_kernels_serve_vllms_runtimes() -> None:
    """In a separate process: Triton decides once whether it interprets."""
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(HERE / "interpreted_residency.py"),
        ],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
