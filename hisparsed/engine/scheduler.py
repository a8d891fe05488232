"""vLLM's scheduler with hisparsed's control attached, by ``scheduler_cls``.

Adds no scheduling of its own: it lets the ledger and the admission order act before each
pass and counts afterwards. One mixin, two classes, as vLLM has a synchronous and an
asynchronous scheduler.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from hisparsed.engine.control import EngineControl, ResizeHot
from hisparsed.engine.messages import ApplyResult, EngineCommand, EngineReport
from hisparsed.engine.worker_report import WorkerReport


class ControlledScheduler:
    """Mixin before a vLLM scheduler class."""

    hisparsed: EngineControl

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hisparsed = EngineControl(self)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.hisparsed.before_schedule(time.monotonic())
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.hisparsed.after_schedule(output)
        return output

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self.hisparsed.request_added(request, time.monotonic())

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.hisparsed.request_freed(request, time.monotonic())
        return result

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)  # type: ignore[misc]
        self.hisparsed.preemptions += 1

    def waited_s(self, request: Any) -> float:
        """Seconds since ``request`` arrived; vLLM stamps arrivals with the wall clock."""
        return max(0.0, time.time() - float(request.arrival_time))

    def hisparsed_report(self, workers: WorkerReport) -> EngineReport:
        started = time.perf_counter()
        report = self.hisparsed.report(time.monotonic(), workers)
        elapsed_us = (time.perf_counter() - started) * 1e6
        return report.model_copy(update={"report_us": elapsed_us})

    def hisparsed_apply(self, command: EngineCommand, resize_hot: ResizeHot | None) -> ApplyResult:
        started = time.perf_counter()
        result = self.hisparsed.apply(command, resize_hot)
        return result.model_copy(update={"apply_us": (time.perf_counter() - started) * 1e6})


class HisparsedScheduler(ControlledScheduler, Scheduler):  # type: ignore[misc]
    """For engines without asynchronous scheduling (the reference and simulated nodes)."""


class HisparsedAsyncScheduler(ControlledScheduler, AsyncScheduler):  # type: ignore[misc]
    """For engines with asynchronous scheduling (the CUDA node's default)."""
