"""Hot buffers seen from the engine: worker calls where our kernels run, vLLM's rare samples else.

Samples are sums of one GPU, with an age instead of a zero.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import stats as vllm_stats
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker as vllm_worker
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from hisparsed.engine.cuda.hot import CudaHot
from hisparsed.engine.cuda.launch import CONNECTOR_MODULE, WORKER_EXTENSION
from hisparsed.engine.plugin import control
from hisparsed.engine.port import SampledRows
from hisparsed.engine.telemetry import H2D_BYTES, HITS, MISSES, HiSparseStats
from hisparsed.engine.worker_report import NO_COUNTERS, HotRows, WorkerReport


def sample(hits: list[int], misses: list[int], sent: list[int], **more: Any) -> dict[str, Any]:
    return {"HiSparseConnector": {HITS: hits, MISSES: misses, H2D_BYTES: sent, **more}}


OLD = sample([90, 60], [10, 40], [6_560, 26_240])
"""As vLLM 0.30 and 0.31 report it: two index groups."""
NEW = sample([90, 60], [10, 40], [6_560, 26_240], host_cache_usage_perc=[0.5])
"""As 0.32 and 0.33 do, with levels in addition to the counters."""


@pytest.mark.parametrize("step", [OLD, NEW], ids=["0.30", "0.32"])
def test_samples_of_both_generations_add_up(step: dict[str, Any]) -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(step, 10.0)
    stats.take(step, 50.0)
    assert stats.rows(53.0) == SampledRows(
        hits_total=300, misses_total=100, h2d_bytes_total=65_600, age_s=3.0
    )


def test_ranks_count_the_same_rows_so_figures_are_of_one_gpu() -> None:
    stats = HiSparseStats(ranks=2)
    stats.take(sample([90, 90], [10, 10], [656, 656]), 1.0)
    assert stats.rows(1.0) == SampledRows(
        hits_total=90, misses_total=10, h2d_bytes_total=656, age_s=0.0
    )


def test_before_the_first_sample_nothing_is_known() -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(None, 1.0)
    stats.take({}, 2.0)
    stats.take({"OffloadingConnector": {"x": 1}}, 3.0)
    assert stats.rows(4.0) is None


@pytest.mark.parametrize(
    "between",
    [None, {"OffloadingConnector": {}}, sample([], [], [], host_cache_usage_perc=[0.7])],
    ids=["nothing", "another connector", "levels only"],
)
def test_steps_without_a_sample_age_the_last_one(between: Any) -> None:
    stats = HiSparseStats(ranks=1)
    stats.take(OLD, 10.0)
    stats.take(between, 70.0)
    rows = stats.rows(70.0)
    assert rows is not None
    assert (rows.hits_total, rows.age_s) == (150, 60.0)


def test_vllm_tells_it_in_these_words() -> None:
    own = vllm_stats.HiSparseKVConnectorStats()
    own.record_snapshot(hits=90, misses=10, host_to_device_bytes=6_560)
    of_all = MultiKVConnectorStats()
    of_all["HiSparseConnector"] = own
    stats = HiSparseStats(ranks=1)
    stats.take(of_all.to_dict(), 1.0)
    assert stats.rows(1.0) == SampledRows(
        hits_total=90, misses_total=10, h2d_bytes_total=6_560, age_s=0.0
    )
    assert vllm_worker._METRICS_INTERVAL == 2000


FIGURES = {
    "counters": {**NO_COUNTERS, "loads": 7, "h2d_bytes": 70},
    "miss_curve": ((64, 0.5), (128, 0.25)),
    "request_curves": {"r": ((64, 3.0),)},
    "rows": {"r": (128, 100, 9, 4, 3, 2)},
}


class InOrder(Future):  # type: ignore[type-arg]
    """A reply of vLLM's multi-process executor: it arrives when the replies before it are taken."""

    def __init__(self, line: deque[InOrder], answer: list[Any]) -> None:
        super().__init__()
        self._line, self._answer = line, answer
        line.append(self)

    def result(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            raise RuntimeError("timeout not implemented")
        while not self.done():
            first = self._line.popleft()
            first.set_result(first._answer)
        return super().result()


class Executor:
    """Two ranks, one message queue."""

    def __init__(self) -> None:
        self.line: deque[InOrder] = deque()
        self.calls: list[str] = []
        self.answers: dict[str, list[Any]] = {
            "hisparsed_hot_figures": [FIGURES, FIGURES],
            "hisparsed_resize_hot": [(1, 5), (1, 5)],
            "hisparsed_doubt_hot": [None, None],
        }

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        assert timeout is None, "a reply that nobody waits for would be taken for the next call's"
        self.calls.append(method)
        reply = InOrder(self.line, self.answers[method])
        return reply if non_block else reply.result()

    def step(self) -> None:
        """A step's own reply is taken, and with it all before it."""
        InOrder(self.line, []).result()


def test_figures_are_those_of_the_report_before_and_no_step_waits_for_them() -> None:
    executor = Executor()
    hot = CudaHot(executor)
    assert hot.hot_report() == WorkerReport(counted=False)
    assert len(executor.line) == 1, "asked, not waited for"
    executor.step()
    told = hot.hot_report()
    assert told.counters["loads"] == 7
    assert told.miss_curve == FIGURES["miss_curve"]
    assert told.request_curves == FIGURES["request_curves"]
    assert told.counted
    assert hot.hot_rows() == {"r": HotRows(128, 100, 9, 4, 3, 2)}


def test_an_idle_engine_takes_the_reply_itself() -> None:
    executor = Executor()
    hot = CudaHot(executor)
    hot.hot_report()
    assert not hot.hot_report().counted, "the reply may still be on its way"
    assert hot.hot_report().counted
    assert executor.calls == ["hisparsed_hot_figures"] * 2


def test_workers_that_have_no_figures_yet_leave_the_last_ones() -> None:
    executor = Executor()
    executor.answers["hisparsed_hot_figures"] = [None, None]
    hot = CudaHot(executor)
    for _ in range(3):
        hot.hot_report()
        executor.step()
    assert not hot.hot_report().counted
    executor.answers["hisparsed_hot_figures"] = [FIGURES, FIGURES]
    for _ in range(2):
        executor.step()
        told = hot.hot_report()
    assert told.counted


def test_a_request_shares_its_curve_object_between_reports_of_the_same_figures() -> None:
    """The engine keeps what it made of a curve for as long as it is the same object."""
    executor = Executor()
    hot = CudaHot(executor)
    hot.hot_report()
    executor.step()
    first, second = hot.hot_report(), hot.hot_report()
    assert first.request_curves is second.request_curves


def test_a_resize_is_done_on_all_ranks_before_it_returns() -> None:
    executor = Executor()
    hot = CudaHot(executor)
    hot.hot_report()
    hot.resize_hot({"r": 3})
    assert executor.calls[-1] == "hisparsed_resize_hot"
    assert not executor.line, "every reply before it was taken too"


def test_ranks_may_move_different_rows_because_ties_of_a_top_k_break_differently() -> None:
    executor = Executor()
    executor.answers["hisparsed_resize_hot"] = [(1, 5), (1, 6)]
    CudaHot(executor).resize_hot({"r": 3})
    assert executor.calls == ["hisparsed_resize_hot"]


def test_ranks_that_shrank_different_requests_end_the_engine() -> None:
    executor = Executor()
    executor.answers["hisparsed_resize_hot"] = [(2, 5), (1, 5)]
    with pytest.raises(RuntimeError, match=r"of \[2, 1\] requests.*engine must be restarted"):
        CudaHot(executor).resize_hot({"r": 3, "s": 3})
    assert executor.calls[-1] == "hisparsed_doubt_hot", "no rank serves another step"


class Scheduler:
    def __init__(self, kernels: str | None) -> None:
        options = {} if kernels is None else {"kernels": kernels}
        self.vllm_config = SimpleNamespace(additional_config={"hisparsed": options})
        self.seen: list[WorkerReport] = []

    def hisparsed_report(self, workers: WorkerReport, release_host: Any) -> Any:
        self.seen.append(workers)
        return {}


@pytest.mark.parametrize(("kernels", "calls"), [("hisparsed", 2), ("vllm", 0), (None, 0)])
def test_the_control_method_asks_workers_only_where_our_kernels_run(
    monkeypatch: pytest.MonkeyPatch, kernels: str | None, calls: int
) -> None:
    monkeypatch.setattr("hisparsed.engine.messages.report_to_wire", dict)
    core = SimpleNamespace(scheduler=Scheduler(kernels), model_executor=Executor())
    for _ in range(2):
        control(core, "report", {})
        core.model_executor.step()
    assert len(core.model_executor.calls) == calls
    assert [one.counted for one in core.scheduler.seen] == [False, bool(calls)]


def test_the_names_that_the_launch_gives_vllm_exist() -> None:
    from importlib import import_module

    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert hasattr(import_module(module), name)
    assert hasattr(import_module(CONNECTOR_MODULE), "HiSparseConnector")
