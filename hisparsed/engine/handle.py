"""The engine as the daemon holds it: vLLM's AsyncLLM behind ``EnginePort``.

One instance an engine life. Calls into the engine core are bounded in time, so a hung engine
shows as a missed report rather than as a hung daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hisparsed.control.engine_port import EngineGone, ServingCounters
from hisparsed.engine.messages import (
    ApplyResult,
    CanaryCall,
    CanaryReport,
    EngineCommand,
    EngineReport,
    RequestTable,
)
from hisparsed.engine.plugin import CONTROL_METHOD

_CALL_TIMEOUT_S = 30.0
"""One engine step may be a long prefill; a call waits for the step to end."""


class EngineHandle:
    """Implements ``EnginePort`` over a running ``AsyncLLM``."""

    def __init__(self, llm: Any, stat_logger: Any) -> None:
        self.llm = llm
        self._stat_logger = stat_logger
        self.reports = 0
        """Reports taken so far; the counts below are the last one's."""
        self.waiting_calls = 0
        self.room_for_calls = 0
        """Calls that could have started running at once."""
        self.refused_calls: Callable[[], int] | None = None
        """Counts calls that an admission limit refused; set by who enforces the limits."""

    def is_alive(self) -> bool:
        return not self.llm.errored

    async def report(self) -> EngineReport:
        report = EngineReport.model_validate(await self._call("report", {}))
        self.reports += 1
        self.waiting_calls = report.requests.waiting
        self.room_for_calls = max(0, report.max_running - report.requests.running)
        return report

    async def apply(self, command: EngineCommand) -> ApplyResult:
        payload = command.model_dump(exclude_none=True)
        return ApplyResult.model_validate(await self._call("apply", payload))

    async def requests(self) -> RequestTable:
        """A line a request; takes engine-thread time, so only for somebody who looks."""
        return RequestTable.model_validate(await self._call("requests", {}))

    async def begin_canary(self, call: CanaryCall) -> None:
        """Announce a request of the daemon's own, before it is sent."""
        await self._call("canary-begin", call.model_dump())

    async def end_canary(self, request_id: str) -> CanaryReport:
        """What the engine saw of it."""
        answer = await self._call("canary-end", {"request_id": request_id})
        return CanaryReport.model_validate(answer)

    def serving(self) -> ServingCounters:
        counters: ServingCounters = self._stat_logger.counters()
        refused = self.refused_calls
        return counters if refused is None else replace(counters, refused=refused())

    def unfinished_requests(self) -> int:
        return int(self.llm.get_num_unfinished_requests())

    async def _call(self, action: str, payload: dict[str, Any]) -> dict[str, Any]:
        if not self.is_alive():
            raise EngineGone("the engine core has died")
        call = asyncio.ensure_future(
            self.llm.engine_core.call_utility_async(CONTROL_METHOD, action, payload)
        )
        waited = 0.0
        try:
            while True:
                # The answer of a dead engine never comes, so look up from waiting at times.
                done, _ = await asyncio.wait({call}, timeout=0.5)
                if done:
                    answer: dict[str, Any] = call.result()
                    return answer
                waited += 0.5
                if not self.is_alive():
                    raise EngineGone("the engine core died during a control call")
                if waited >= _CALL_TIMEOUT_S:
                    message = f"engine control call {action!r} took over {_CALL_TIMEOUT_S} s"
                    raise TimeoutError(message)
        finally:
            # Also where nobody waits any longer: what it ends in is nobody's then.
            call.cancel()

    def shutdown(self, timeout_s: float) -> None:
        """Stop the engine core; blocks up to ``timeout_s``, then it is killed by vLLM.

        Not from the event loop's own thread: that has to end vLLM's reader meanwhile.
        """
        reader = self.llm.output_handler
        if reader is not None:
            # Still reading, it would log the end that we asked for as a crash of the engine.
            reader.get_loop().call_soon_threadsafe(reader.cancel)
        self.llm.shutdown(timeout=timeout_s)


def start_engine(vllm_config: Any, llm_class: Any) -> EngineHandle:
    """Start the engine core process and wait until it serves. Needs a running event loop.

    ``llm_class`` is vLLM's ``AsyncLLM`` or a subclass of it.
    Raises whatever vLLM raises when the engine cannot start; nothing is left running then.
    """
    llm = llm_class.from_vllm_config(vllm_config)
    return EngineHandle(llm, find_stat_logger(llm.logger_manager))


def find_stat_logger(manager: Any) -> Any:
    """Our stat logger among vLLM's; vLLM made it from the installed entry point.

    Raises ``RuntimeError`` when hisparsed is on the path but not installed.
    """
    from hisparsed.engine.telemetry import HisparsedStatLogger

    for logger in getattr(manager, "stat_loggers", []):
        for candidate in (logger, *getattr(logger, "per_engine_stat_loggers", {}).values()):
            if isinstance(candidate, HisparsedStatLogger):
                return candidate
    raise RuntimeError(
        "vLLM did not load hisparsed's entry points; install the package (pip install -e .) "
        "and check that VLLM_PLUGINS does not leave it out"
    )
