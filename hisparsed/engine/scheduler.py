"""vLLM's scheduler with hisparsed's control attached, by ``scheduler_cls``.

Does not schedule: it lets the ledger and the admission order act before each pass, counts
afterwards, and intervenes only if nothing runs although it could. One mixin, two classes, as vLLM
has a synchronous and an asynchronous scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from hisparsed.engine.compat.adapters import (
    fail_put_off_loads,
    forget_failed_blocks,
    left_to_decode,
    waiting_queues,
)
from hisparsed.engine.control import EngineControl
from hisparsed.engine.host.memory import ReleaseHost
from hisparsed.engine.messages import RequestTable
from hisparsed.engine.remote_prefix import NixlPrefixes
from hisparsed.engine.request_table import request_table
from hisparsed.engine.stall import (
    Remedy,
    StallWatch,
    StepFacts,
    loads_are_done,
    take_back_from_youngest,
)
from hisparsed.engine.step_cpu import StepCpuTimes
from hisparsed.engine.worker_report import HotRows, WorkerReport
from hisparsed.policy.signals import EngineReport

log = logging.getLogger("hisparsed.engine")


class ControlledScheduler:
    """Mixin before a vLLM scheduler class."""

    hisparsed: EngineControl
    clock_s: Callable[[], float] = staticmethod(time.monotonic)
    """Monotonic seconds; a node with a virtual clock sets its own on the instance."""
    wall_clock_s: Callable[[], float] = staticmethod(time.time)
    """The clock that vLLM stamps arrivals with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stall = StallWatch()
        self._given_up: list[Any] = []
        self.step_cpu = StepCpuTimes()
        self.hisparsed = EngineControl(self)
        self._prefixes = self._nixl_prefixes()

    def _nixl_prefixes(self) -> NixlPrefixes | None:
        config = self.vllm_config  # type: ignore[attr-defined]
        peers = config.additional_config.get("hisparsed", {}).get("prefill_peers")
        if peers is None:
            return None
        return NixlPrefixes(
            peers,
            int(config.cache_config.block_size),
            left_to_decode(config),
            ranks=int(config.parallel_config.tensor_parallel_size),
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self.step_cpu.scheduling():
            return self._schedule(*args, **kwargs)

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.hisparsed.before_schedule(self.clock_s())
        with self.hisparsed.host.scheduling():
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.hisparsed.after_schedule(output)
        if self.hisparsed.nothing_can_run:
            holder = take_back_from_youngest(self)
            if holder is not None:
                log.warning(
                    "Waiting calls hold the blocks that other calls need, and no call runs; %s (%d "
                    "tokens) restarts.",
                    holder.request_id,
                    holder.num_tokens,
                )
        self._relieve_stall(output.total_num_scheduled_tokens)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        with self.step_cpu.taking_output(self.clock_s()):
            return self._take_output(*args, **kwargs)

    def _take_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        forget_failed_blocks(model_runner_output, calls_follow=self._prefixes is not None)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.hisparsed.host.output_taken()
        self.hisparsed.canary.output_taken()
        for request in self._given_up:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                )
            )
        self._given_up.clear()
        return outputs

    def reset_connector_cache(self) -> bool:
        # vLLM cannot reset it again before a step has done the first reset's flush.
        if self.hisparsed.host.reset_is_on_its_way():
            return True
        fail_put_off_loads(self)
        return bool(super().reset_connector_cache())  # type: ignore[misc]

    def _relieve_stall(self, scheduled_tokens: int) -> None:
        scheduler: Any = self
        facts = StepFacts(
            now_s=self.clock_s(),
            running=len(scheduler.running),
            waiting=sum(map(len, waiting_queues(scheduler))),
            scheduled_tokens=scheduled_tokens,
            transfers=not loads_are_done(scheduler) or self.hisparsed.transfers_in_flight(),
            paused=scheduler.pause_state is not PauseState.UNPAUSED,
        )
        remedy = self.stall.step(facts)
        if remedy is None:
            return
        holder = take_back_from_youngest(scheduler, least=1)
        head = holder or scheduler.waiting.peek_request()
        if holder is not None:
            # With its loaded prefix it could not start; from its prompt it needs fewer blocks at
            # once.
            remedy = Remedy.FORGET_PREFIX
        log.warning(
            "Nothing runs and %d calls wait with memory free: %s (head %s, %d tokens).",
            facts.waiting,
            remedy,
            head.request_id,
            head.num_tokens,
        )
        if remedy is Remedy.LIFT_LIMIT:
            limit = self.hisparsed.active_limit
            limit.set(max(1, limit.most))
        elif remedy is Remedy.NEXT_IN_LINE:
            scheduler.waiting.pop_request()
            scheduler.waiting.add_request(head)
        elif remedy is Remedy.FORGET_PREFIX:
            head.skip_reading_prefix_cache = True
        else:
            self._given_up.extend(
                scheduler.finish_requests(head.request_id, RequestStatus.FINISHED_ERROR)
            )

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests  # type: ignore[attr-defined]
        if self._prefixes is not None and not known:
            self._prefixes.look(request)
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self.hisparsed.request_added(request, self.clock_s())

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.hisparsed.request_freed(request, self.clock_s())
        return result

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)  # type: ignore[misc]
        self.hisparsed.preemptions += 1

    def waited_s(self, request: Any) -> float:
        """Seconds since ``request`` arrived; vLLM stamps arrivals with the wall clock."""
        return max(0.0, self.wall_clock_s() - float(request.arrival_time))

    def hisparsed_report(
        self, workers: WorkerReport, release_host: ReleaseHost | None = None
    ) -> EngineReport:
        started = time.perf_counter()
        now_s = self.clock_s()
        report = replace(
            self.hisparsed.report(now_s, workers, release_host),
            step_cpu=self.step_cpu.figures(now_s),
        )
        return replace(report, report_cost_s=time.perf_counter() - started)

    def hisparsed_requests(self, hot: Mapping[str, HotRows]) -> RequestTable:
        return request_table(self, self.hisparsed.resident_managers, hot)


class HisparsedScheduler(ControlledScheduler, Scheduler):  # type: ignore[misc]
    """For engines without asynchronous scheduling (the reference and simulated nodes)."""


class HisparsedAsyncScheduler(ControlledScheduler, AsyncScheduler):  # type: ignore[misc]
    """For engines with asynchronous scheduling (the CUDA node's default)."""
