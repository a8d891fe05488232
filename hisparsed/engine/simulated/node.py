"""The simulated node in one hand: engine core, virtual clock, calls in, tokens out.

Synchronous and single-threaded; whoever drives it decides when a step is taken. Calls carry
names of their blocks instead of tokens, so that prefixes are equal where names are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.request import Request

from hisparsed.control.engine_port import ServingCounters
from hisparsed.engine.messages import ApplyResult, EngineCommand, EngineReport
from hisparsed.engine.plugin import control
from hisparsed.engine.simulated.clock import VirtualClock
from hisparsed.engine.simulated.executor import TOKEN, SimulatedExecutor
from hisparsed.engine.simulated.lookups import remember_lookups
from hisparsed.engine.simulated.serving import ServingTally
from hisparsed.engine.simulated.vllm_config import SimulatedOptions, build_vllm_config
from hisparsed.engine.simulated.work import AllResident, ManagersResidency


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One request: ``blocks`` name its full blocks, those of its answer included."""

    request_id: str
    blocks: Sequence[bytes]
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens of one request that a step brought; ``cached_tokens`` come with the first."""

    request_id: str
    tokens: int
    finished: bool
    failed: bool
    cached_tokens: int | None


class SimulatedNode:
    """A started engine. Implements ``EnginePort``, so the control loop can drive it."""

    def __init__(self, options: SimulatedOptions) -> None:
        config = build_vllm_config(options)
        self._core: Any = EngineCore(config, SimulatedExecutor, log_stats=True)
        self._executor: SimulatedExecutor = self._core.model_executor
        self._scheduler: Any = self._core.scheduler
        self._block_tokens = int(config.cache_config.block_size)
        self.clock: VirtualClock = self._executor.clock
        self.hisparse = options.hisparse
        if options.hisparse:
            self._scheduler.clock_s = self.clock.now_s
            self._scheduler.wall_clock_s = self.clock.unix_s
            remember_lookups(self._scheduler.kv_cache_manager.coordinator)
            coordinator = get_hisparse_coordinator(self._scheduler.kv_cache_manager)
            resident, hot = coordinator.resident_managers[0], coordinator.hot_managers[0]
            self._executor.bind(ManagersResidency(resident, hot, self._block_tokens))
        else:
            self._executor.bind(AllResident())
        self.tally = self._executor.tally
        self._serving = ServingTally()

    # --- calls ------------------------------------------------------------------------

    def add(self, call: SimulatedCall) -> None:
        """Queue a call as of now."""
        request = Request(
            request_id=call.request_id,
            prompt_token_ids=[TOKEN] * call.input_tokens,
            sampling_params=SamplingParams(max_tokens=call.output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=self.clock.unix_s(),
            block_hasher=_hasher(call, self._block_tokens),
        )
        self._scheduler.add_request(request)
        self._serving.arrived(call.request_id, call.input_tokens, self.clock.now_s())

    @property
    def busy(self) -> bool:
        """Whether a step may bring something: requests, or what is left of finished ones."""
        return bool(self._scheduler.has_requests())

    def step(self) -> tuple[list[Emitted], bool]:
        """One engine step; time passes by what it computed.

        Returns what it emitted, and whether it computed anything.
        """
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        emitted = [
            self._taken(output) for of_client in outputs.values() for output in of_client.outputs
        ]
        return emitted, bool(executed)

    def _taken(self, output: Any) -> Emitted:
        prefill, reason = output.prefill_stats, output.finish_reason
        cached = None if prefill is None else int(prefill.num_cached_tokens)
        tokens = len(output.new_token_ids)
        self._serving.emitted(output.request_id, tokens, cached, self.clock.now_s())
        if reason is not None:
            self._serving.ended(output.request_id, str(reason))
        return Emitted(
            output.request_id, tokens, reason is not None, str(reason) == "error", cached
        )

    def next_copy_done_s(self) -> float | None:
        """When the next page or chunk in flight arrives."""
        return self._executor.next_copy_done_s()

    def copied_bytes(self) -> float:
        """Bulk copies over one GPU's link so far, on the scaled node."""
        return self._executor.copied_bytes()

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        running, waiting = self._scheduler.get_request_counts()
        return int(running), int(waiting)

    def gpu_free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def shutdown(self) -> None:
        self._core.shutdown()

    # --- the control side; only with HiSparse --------------------------------------------

    def take_report(self) -> EngineReport:
        return EngineReport.model_validate(control(self._core, "report", {}))

    def put(self, command: EngineCommand) -> ApplyResult:
        payload = command.model_dump(exclude_none=True)
        result = ApplyResult.model_validate(control(self._core, "apply", payload))
        # The engine measures this machine's time; here none passes, and journals are to be equal.
        return result.model_copy(update={"apply_us": 0.0})

    async def report(self) -> EngineReport:
        return self.take_report()

    async def apply(self, command: EngineCommand) -> ApplyResult:
        return self.put(command)

    def serving(self) -> ServingCounters:
        return self._serving.counters(self.tally.preemptions)


def _hasher(call: SimulatedCall, block_tokens: int) -> Callable[[Any], list[bytes]]:
    """vLLM's block hashes from names: those of blocks that are full and not named yet."""

    def hashes(request: Any) -> list[bytes]:
        known = len(request.block_hashes)
        return list(call.blocks[known : request.num_tokens // block_tokens])

    return hashes
