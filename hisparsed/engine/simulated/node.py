"""The simulated node as one object: engine core, virtual clock, calls in, tokens out.

Synchronous and single-threaded; the caller decides when a step is taken. Calls carry
names of their blocks instead of tokens, so that prefixes are equal where names are.
``ServingTally`` keeps the serving counters that vLLM's stat logger keeps on a real node.

vLLM asks for the whole prefix of the head of its queue again in every pass, block by block.
``RememberedLookups`` remembers the answers between passes: the same answers in less time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.request import Request

from hisparsed.engine.held_prefix import RememberedPrefix
from hisparsed.engine.messages import ApplyResult, command_to_wire, report_from_wire
from hisparsed.engine.plugin import control
from hisparsed.engine.port import ServingCounters
from hisparsed.engine.simulated.cost import VirtualClock
from hisparsed.engine.simulated.executor import TOKEN, SimulatedExecutor
from hisparsed.engine.simulated.vllm_config import SimulatedOptions, build_vllm_config
from hisparsed.engine.simulated.work import AllResident, ManagersResidency
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import EngineReport


@dataclass(slots=True)
class _Open:
    arrived_s: float
    input_tokens: int
    last_token_s: float | None = None


class ServingTally:
    """Told of calls and tokens with their times; sums only."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._prompt = self._generated = self._hit = 0
        self._finished: Counter[str] = Counter()
        self._ttft_sum_s = self._itl_sum_s = 0.0
        self._ttft_count = self._itl_count = 0

    def arrived(self, request_id: str, input_tokens: int, now_s: float) -> None:
        self._open[request_id] = _Open(now_s, input_tokens)

    def emitted(self, request_id: str, tokens: int, cached: int | None, now_s: float) -> None:
        """``cached`` is given once, when a prompt is computed: its tokens from the caches."""
        call = self._open[request_id]
        self._generated += tokens
        if cached is not None:
            self._prompt += call.input_tokens
            self._hit += cached
        if not tokens:
            return
        if call.last_token_s is None:
            self._ttft_sum_s += now_s - call.arrived_s
            self._ttft_count += 1
        else:
            self._itl_sum_s += now_s - call.last_token_s
            self._itl_count += 1
        call.last_token_s = now_s

    def ended(self, request_id: str, reason: str) -> None:
        del self._open[request_id]
        self._finished[reason] += 1

    def counters(self, preemptions: int) -> ServingCounters:
        return ServingCounters(
            prompt_tokens=self._prompt,
            generated_tokens=self._generated,
            prefix_query_tokens=self._prompt,
            prefix_hit_tokens=self._hit,
            preemptions=preemptions,
            finished=dict(self._finished),
            ttft_sum_s=self._ttft_sum_s,
            ttft_count=self._ttft_count,
            itl_sum_s=self._itl_sum_s,
            itl_count=self._itl_count,
        )


_CALLS = 64


class RememberedLookups:
    """In the place of one full-attention group's manager class, of which vLLM's coordinator asks
    the longest cached prefix and nothing else."""

    def __init__(self, manager_cls: Any) -> None:
        self._manager_cls = manager_cls
        self.supports_fine_grained_hash_lookup = manager_cls.supports_fine_grained_hash_lookup
        # By the address of a call's list of hashes, which the prefix keeps: no other gets it.
        self._found: OrderedDict[int, RememberedPrefix] = OrderedDict()

    def find_longest_cache_hit(
        self,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **rest: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        size = int(kv_cache_spec.block_size)
        whole = size == block_pool.hash_block_size == alignment_tokens and not drop_eagle_block
        if len(kv_cache_group_ids) != 1 or not whole or not isinstance(block_hashes, list):
            found: tuple[tuple[list[Any], ...], int] = self._manager_cls.find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                **rest,
            )
            return found
        blocks = self._blocks(block_hashes, max_length // size, kv_cache_group_ids[0], block_pool)
        return (blocks,), len(blocks) * size

    def _blocks(self, hashes: list[bytes], most: int, group: int, pool: Any) -> list[Any]:
        known = self._found.pop(id(hashes), None) or RememberedPrefix(hashes, group)
        self._found[id(hashes)] = known
        if len(self._found) > _CALLS:
            self._found.popitem(last=False)
        return known.walk(pool.cached_block_hash_to_block, most)


def remember_lookups(coordinator: Any) -> None:
    """Let a hybrid coordinator's full-attention groups remember."""
    own = FullAttentionManager.find_longest_cache_hit.__func__
    coordinator.attention_groups = [
        group._replace(manager_cls=RememberedLookups(group.manager_cls))
        if getattr(group.manager_cls.find_longest_cache_hit, "__func__", None) is own
        else group
        for group in coordinator.attention_groups
    ]


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
            self._scheduler.step_cpu = self._executor.step_cpu
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
        return report_from_wire(control(self._core, "report", {}))

    def put(self, command: EngineCommand) -> ApplyResult:
        payload = command_to_wire(command)
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
