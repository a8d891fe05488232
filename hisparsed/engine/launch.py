"""From the node's configuration to a running engine, and the handle by which the daemon holds it.

Each kind of node has a module behind ``launch_engine`` with the functions of ``NodeBody``. Kinds
differ in what they refuse and in vLLM's configuration; all else is the same code. Imports vLLM
only when called.

vLLM takes from the environment how it starts processes. It forks on CUDA by default; a forked
engine core shares the daemon's signal wake-up and sockets, and its plugins count as loaded. So
``environment.set_process_start`` sets spawn, before vLLM is imported.

``EngineHandle`` is vLLM's AsyncLLM behind ``EnginePort``, one instance per engine. Calls into the
engine core are bounded in time: a hung engine shows as a missed report, not as a hung daemon.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.engine.compat.features import require_supported_vllm
from hisparsed.engine.compat.versions import installed_vllm
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.environment import refuse_unreadable
from hisparsed.engine.messages import (
    ApplyResult,
    CanaryCall,
    CanaryReport,
    RequestTable,
    command_to_wire,
    report_from_wire,
)
from hisparsed.engine.plugin import CONTROL_METHOD, Guard
from hisparsed.engine.port import EngineGone, HotPolicy, ServingCounters
from hisparsed.errors import EngineStartError, UserError
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import EngineReport


class NodeBody(Protocol):
    """The properties of a kind of node. Nothing here imports vLLM before the last two."""

    def served_names(self, config: NodeConfig) -> tuple[str, ...]:
        """Model names that clients may ask for; the first is the model's own."""
        ...

    def asked_multiplier(self, config: NodeConfig, policy: HotPolicy) -> float:
        """The multiplier that vLLM's tables must have room for."""
        ...

    def require_startable(self, config: NodeConfig, *, max_multiplier: float) -> None:
        """Refuse configurations that can never start. Raises ``UserError``."""
        ...

    def vllm_config(self, config: NodeConfig, *, max_multiplier: float) -> Any:
        """vLLM's configuration. Raises ``UserError`` when vLLM refuses it."""
        ...

    def llm_class(self) -> Any:
        """``LimitedLLM`` or a subclass of it."""
        ...


def body_of(kind: NodeKind) -> NodeBody:
    """The launch functions of a kind of node that serves; raises ``UserError`` for any other
    kind."""
    if kind == "cuda":
        from hisparsed.engine.cuda import launch as cuda

        return cuda
    if kind == "reference":
        from hisparsed.engine.reference import launch as reference

        return reference
    raise UserError(
        f"node: {kind} serves no clients, because its time is virtual; try policies on it with "
        "`hisparsed simulate`, or set node: reference to serve"
    )


def served_names(config: NodeConfig, kind: NodeKind) -> tuple[str, ...]:
    """Model names that clients may ask the node for; the first is the model's own."""
    return body_of(kind).served_names(config)


def asked_multiplier(config: NodeConfig, kind: NodeKind, policy: HotPolicy) -> float:
    """``max_multiplier`` for the functions below: the policy's highest if buffers can change size
    while the node runs, else its start value."""
    return body_of(kind).asked_multiplier(config, policy)


def proved_multiplier(config: NodeConfig, kind: NodeKind, policy: HotPolicy) -> float | None:
    """The multiplier instead of ``asked_multiplier`` once hisparsed's kernels are proved on a CUDA
    node that asks for a proof (``cuda.kernels: auto``)."""
    if kind != "cuda":
        return None
    from hisparsed.engine.cuda import launch as cuda

    return cuda.proved_multiplier(config, policy)


def require_startable(config: NodeConfig, kind: NodeKind, *, max_multiplier: float) -> None:
    """Refuse configurations that can never start, before anything is taken and vLLM is imported.

    ``max_multiplier`` is the policy's, in top-k. Raises ``UserError``.
    """
    require_supported_vllm(config, kind, installed_vllm(), os.environ)
    body_of(kind).require_startable(config, max_multiplier=max_multiplier)


def launch_engine(
    config: NodeConfig,
    kind: NodeKind,
    *,
    max_multiplier: float,
    context_limit: ContextLimit,
    lends: bool = True,
) -> EngineHandle:
    """Start the engine of a ``config`` that is startable; blocks until it can serve.

    ``max_multiplier``, in top-k, bounds any hot buffer; vLLM sizes its tables for it. Calls keep to
    ``context_limit``, which outlives engines. ``lends``: whether the offload pool may have blocks.
    Raises ``UserError`` when vLLM refuses the configuration, ``EngineStartError`` when the engine
    then does not start.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", config.log.level.upper())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

    refuse_unreadable(os.environ)
    body = body_of(kind)
    vllm_config = body.vllm_config(config, max_multiplier=max_multiplier)
    vllm_config.additional_config.setdefault("hisparsed", {})["lends"] = lends
    vllm_config.hisparsed_guard = Guard()
    try:
        return start_engine(vllm_config, body.llm_class(), context_limit)
    except Exception as error:
        raise EngineStartError(f"{error}\nThe lines above, from vLLM, say why.") from error


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
        self.own_calls: set[str] = set()
        """Ids of the daemon's own requests; they are in no statistics."""

    def is_alive(self) -> bool:
        return not self.llm.errored

    async def report(self) -> EngineReport:
        report = report_from_wire(await self._call("report", {}))
        self.reports += 1
        self.waiting_calls = report.requests.waiting
        self.room_for_calls = max(0, report.admission.max_running - report.requests.running)
        return report

    async def apply(self, command: EngineCommand) -> ApplyResult:
        payload = command_to_wire(command)
        return ApplyResult.model_validate(await self._call("apply", payload))

    async def requests(self) -> RequestTable:
        """One line per request; takes engine-thread time, so only on request."""
        return RequestTable.model_validate(await self._call("requests", {}))

    async def begin_canary(self, call: CanaryCall) -> None:
        """Announce a request of the daemon's own, before it is sent."""
        self.own_calls.add(call.request_id)
        await self._call("canary-begin", call.model_dump())

    async def end_canary(self, request_id: str) -> CanaryReport:
        """The engine's observations of it, after its answer."""
        self.own_calls.discard(request_id)
        answer = await self._call("canary-end", {"request_id": request_id})
        return CanaryReport.model_validate(answer)

    def serving(self) -> ServingCounters:
        counters: ServingCounters = self._stat_logger.counters()
        return counters

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
                # A dead engine never answers, so check it at intervals while waiting.
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
            # Also if nothing waits any longer: the result is then dropped.
            call.cancel()

    def shutdown(self, timeout_s: float) -> None:
        """Stop the engine core; blocks up to ``timeout_s``, then it is killed by vLLM.

        Not from the event loop's own thread: that has to end vLLM's reader meanwhile.
        """
        reader = self.llm.output_handler
        if reader is not None:
            # A reader that still runs would log the requested end as a crash of the engine.
            reader.get_loop().call_soon_threadsafe(reader.cancel)
        self.llm.shutdown(timeout=timeout_s)


def start_engine(vllm_config: Any, llm_class: Any, context_limit: ContextLimit) -> EngineHandle:
    """Start the engine core process and wait until it serves. Needs a running event loop.

    ``llm_class`` is a ``LimitedLLM``. Raises vLLM's error when the engine cannot start; then no
    process is left.
    """
    from hisparsed.engine.telemetry import ClientStats

    llm = llm_class.from_vllm_config(vllm_config)
    llm.context_limit = context_limit
    context_limit.chars_per_token = llm.chars_per_token
    context_limit.model_tokens = int(llm.model_config.max_model_len)
    handle = EngineHandle(llm, find_stat_logger(llm.logger_manager))
    ClientStats.of(llm.output_processor, handle.own_calls)
    return handle


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
        "vLLM did not load hisparsed's entry points; install the package (pip install -e .)"
    )
