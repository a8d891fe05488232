"""What the control method asks of vLLM's executor about hot buffers, and what it makes of it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hisparsed.engine.cuda.hot import CudaHot
from hisparsed.engine.cuda.kernels_choice import CONNECTOR_MODULE, WORKER_EXTENSION
from hisparsed.engine.plugin import control
from hisparsed.engine.request_table import HotRows
from hisparsed.engine.worker_report import NO_COUNTERS, WorkerReport

FIGURES = {
    "counters": {**NO_COUNTERS, "loads": 7, "h2d_bytes": 70},
    "miss_curve": ((64, 0.5), (128, 0.25)),
    "request_curves": {"r": ((64, 3.0),)},
    "rows": {"r": (128, 100, 9, 4, 3, 2)},
}


class InOrder(Future):  # type: ignore[type-arg]
    """A reply of vLLM's multi-process executor: it comes when somebody takes what is before it."""

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
        return SimpleNamespace(model_dump=dict)


@pytest.mark.parametrize(("kernels", "calls"), [("hisparsed", 2), ("vllm", 0), (None, 0)])
def test_the_control_method_asks_workers_only_where_our_kernels_run(
    kernels: str | None, calls: int
) -> None:
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
