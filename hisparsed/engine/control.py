"""The engine side of the control path: report and apply, on the engine thread.

Built by hisparsed's scheduler around vLLM's managers. Everything is counted where it changes, so a
report costs time in proportion to running requests, not to blocks or pages. It also keeps two
figures that vLLM does not: the seconds of steps that only decode, and the GPU blocks that the head
of the waiting queue lacked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator

from hisparsed.engine.admission import OldestTurn, SessionTable, WaitingCall, held_prefix_first
from hisparsed.engine.canary_calls import CanaryCalls
from hisparsed.engine.compat.adapters import ActiveLimit, waiting_queues
from hisparsed.engine.compat.replaced import pages_can_be_whole
from hisparsed.engine.compat.residency import watch_lost_pages
from hisparsed.engine.held_prefix import HeldPrefix
from hisparsed.engine.host.chunks import ChunkLayout, chunk_layout
from hisparsed.engine.host.ghosts import PoolGhosts
from hisparsed.engine.host.memory import HostMemory, ReleaseHost
from hisparsed.engine.host.offload import (
    fence_stores,
    find_offload_manager,
    find_offloading_scheduler,
)
from hisparsed.engine.hot import HotShares, HotUnits, LeasedHotManager, ResizeHot
from hisparsed.engine.messages import ApplyResult
from hisparsed.engine.request_table import resident_blocks
from hisparsed.engine.resident import CountingResidentManager
from hisparsed.engine.scratch import lease_scratch
from hisparsed.engine.worker_report import WorkerReport
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    EngineReport,
    GpuPool,
    LiveSet,
    PoolGeometry,
    Progress,
    Requests,
    Watermark,
)

log = logging.getLogger("hisparsed.engine")

_DEFAULT_AGEING_S = 30.0
"""The API's limits until a policy sets others."""
_DEFAULT_SESSION_TTL_S = 300.0
"""95 % of coding-agent calls return within this time."""


class EngineControl:
    """Levers and counters of one engine core. ``scheduler`` is vLLM's, fully built."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._cache_manager = scheduler.kv_cache_manager
        self._coordinator = get_hisparse_coordinator(self._cache_manager)
        config = self._cache_manager.kv_cache_config
        self._offload = find_offload_manager(scheduler.connector)
        fence_stores(find_offloading_scheduler(scheduler.connector), config)
        self._topk = int(scheduler.vllm_config.model_config.hf_config.index_topk)
        self._query_len = 1 + int(scheduler.num_spec_tokens)
        options = scheduler.vllm_config.additional_config.get("hisparsed", {})
        self._scratch_blocks = int(options.get("scratch_blocks", 0))
        lease_scratch(self._cache_manager.block_pool, self._scratch_blocks)
        # Without scratch the rows of one step must fit the lease, whatever they select.
        self._least_lease_rows = self._topk * (1 if self._scratch_blocks else self._query_len)
        # vLLM's own kernels take one size for all requests, because graphs have recorded it.
        self._hot_live = options.get("kernels") != "vllm"
        self._lends = bool(options.get("lends", True))
        self._hot: list[LeasedHotManager] = []
        for manager in self._coordinator.hot_managers:
            manager.__class__ = LeasedHotManager
            manager.start_leases(
                manager.blocks_per_request,
                hot_groups=len(self._coordinator.hot_managers),
                grow_headroom=int(config.num_blocks) // 10 if self._hot_live else None,
            )
            self._hot.append(manager)
        self._resident: list[CountingResidentManager] = []
        committing: set[str] = set()
        for manager in self._coordinator.resident_managers:
            manager.__class__ = CountingResidentManager
            manager.start_counting(committing)
            self._resident.append(manager)
        watch_lost_pages(self._coordinator, CountingResidentManager.count_lost_page)
        if options.get("bookkeeping") != "vllm":
            self._keep_pages_whole()
        self._block_tokens = int(self._coordinator.host_manager.block_size)
        source_group = int(self._coordinator.host_group_id)
        self._copies = int(options.get("offload_copies", 1))
        layout = chunk_layout(config, source_group, self._copies)
        max_model_len = int(scheduler.max_model_len)
        floor = -(-max_model_len // self._block_tokens) + 2
        self.host = HostMemory(
            self._coordinator,
            self._offload,
            layout,
            floor,
            lambda: (block for _, blocks in scheduler.deferred_frees for block in blocks),
        )
        self._shares = HotShares(
            self._hot,
            HotUnits(self._topk, self._block_tokens, self._least_lease_rows),
            live=self._hot_live,
        )
        self._gpu_need = GpuNeed(self._cache_manager)
        self.ghosts = PoolGhosts(
            self.host.pool,
            self._offload,
            self._cache_manager.block_pool,
            source_group=source_group,
            indexer_group=source_group + 1,
            block_tokens=self._block_tokens,
        )
        self.canary = CanaryCalls(
            self._coordinator, self._resident, self._cache_manager.block_pool, source_group + 1
        )
        self._held = HeldPrefix(
            self.host.pool,
            self._cache_manager.block_pool,
            self._offload._policy,
            source_group,
            source_group + 1,
            self._block_tokens,
        )
        self.sessions = SessionTable(_DEFAULT_SESSION_TTL_S)
        self._oldest_turn = OldestTurn()
        self.active_limit = ActiveLimit(scheduler)
        self._admission = AdmissionRules(
            AdmissionOrder.ARRIVAL, _DEFAULT_AGEING_S, self.active_limit.configured
        )
        self._default_watermark = True
        self._geometry = self._describe(config, layout)
        self.preemptions = 0
        self.finished = 0
        self._steps = 0
        self._scheduled_tokens = 0
        self._decode_time = DecodeTime(self._query_len)
        self._waiting_for_blocks = False
        self.nothing_can_run = False
        """After the last pass nothing ran, calls waited, and nothing was in flight."""
        self._held_back = 0

    def _keep_pages_whole(self) -> None:
        if not pages_can_be_whole():
            log.warning(
                "hisparsed does not know the page bookkeeping of this vLLM and leaves it in place. "
                "Steps take several times the CPU time."
            )
            return
        # Names that only this vLLM version has.
        from hisparsed.engine.pages import keep_pages_whole

        keep_pages_whole(self._cache_manager, self._coordinator)
        find_offloading_scheduler(self._scheduler.connector).asks_whole_prefixes = True

    # --- geometry ------------------------------------------------------------------

    def _describe(self, config: Any, layout: ChunkLayout) -> PoolGeometry:
        hot_groups = len(self._hot)
        row_bytes = layout.block_bytes // self._block_tokens // max(1, hot_groups)
        return PoolGeometry(
            block_tokens=self._block_tokens,
            host_block_bytes=layout.block_bytes,
            offload_chunk_tokens=self._block_tokens,
            offload_chunk_bytes=layout.chunk_bytes // self._copies,
            chunks_per_host_block=layout.chunks_per_block,
            offload_copies=self._copies,
            budget_blocks=self.host.ledger.budget,
            max_model_len=int(self._scheduler.max_model_len),
            topk=self._topk,
            decode_query_len=self._query_len,
            gpu_blocks_total=int(config.num_blocks),
            hot_block_rows=self._block_tokens,
            hot_groups=hot_groups,
            max_lease_blocks=self._hot[0].blocks_per_request,
            min_lease_rows=self._least_lease_rows,
            max_num_seqs=int(self._scheduler.max_num_running_reqs),
            row_bytes=row_bytes,
            max_step_tokens=int(self._scheduler.max_num_scheduled_tokens),
            hot_live=self._hot_live,
            lends=self._lends,
        )

    # --- called by the scheduler ----------------------------------------------------

    def before_schedule(self, now_s: float) -> None:
        """Let the ledger move blocks, and sort the waiting calls."""
        self.host.advance(self.head_need_blocks(), busy=bool(self._scheduler.running))
        self.active_limit.before_pass()
        self._decode_time.pass_begins(now_s, bool(self._scheduler.running))
        waiting = self._scheduler.waiting
        self.canary.before_schedule(self._scheduler.running, waiting)
        by_hand = self._scheduler.stall.stalled
        ordered = self._admission.order is AdmissionOrder.HELD_PREFIX_FIRST
        if ordered and len(waiting) > 1 and not by_hand:
            self._reorder(waiting, now_s)

    def after_schedule(self, output: Any) -> None:
        scheduler = self._scheduler
        self._steps += 1
        self._scheduled_tokens += output.total_num_scheduled_tokens
        self._decode_time.pass_ended(output.num_scheduled_tokens.values())
        self.canary.after_schedule(scheduler.running, output.num_scheduled_tokens)
        waiting = len(scheduler.waiting)
        limited = len(scheduler.running) >= self.active_limit.most
        room = output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        self._waiting_for_blocks = bool(waiting) and not limited and room
        below_own_limit = self.active_limit.most < self.active_limit.configured
        self._held_back = waiting if limited and below_own_limit else 0
        self.nothing_can_run = self._idle_with_waiting(output.total_num_scheduled_tokens)
        self.host.pass_done(
            idle_with_waiting=self.nothing_can_run, head_need_blocks=self.head_need_blocks()
        )

    def _idle_with_waiting(self, scheduled_tokens: int) -> bool:
        scheduler = self._scheduler
        if scheduled_tokens or scheduler.running or not any(scheduler.get_request_counts()):
            return False
        return scheduler.pause_state is PauseState.UNPAUSED and not self.transfers_in_flight()

    def transfers_in_flight(self) -> bool:
        """Whether copies or loads are running that could free memory when they end."""
        return bool(self._coordinator.has_pending_work() or self._offload.in_flight_chunks)

    def request_added(self, request: Any, now_s: float) -> None:
        if self.canary.added(request):
            return
        self.ghosts.arrived(request)
        self.sessions.start(request.request_id, request.block_hashes, request.num_tokens, now_s)

    def request_freed(self, request: Any, now_s: float) -> None:
        if not self.canary.owns(request.request_id):
            self.finished += 1
        self._held.forget(request.request_id)
        self.sessions.finish(request.request_id, request.block_hashes, request.num_tokens, now_s)

    def head_need_blocks(self) -> int:
        """Host blocks that the next call needs to start, beyond those it holds; 0 when none waits.

        Calls whose prefix was loaded wait in their own queue, and hold blocks there.
        """
        heads = [queue.peek_request() for queue in waiting_queues(self._scheduler) if queue]
        return max(map(self._need_blocks, heads), default=0)

    def _need_blocks(self, request: Any) -> int:
        blocks = -(-(int(request.num_tokens) + 1) // self._block_tokens) + 1
        return blocks - len(
            self._coordinator.host_manager.req_to_blocks.get(request.request_id, ())
        )

    def _reorder(self, waiting: Any, now_s: float) -> None:
        requests = list(waiting)
        self._held.look(requests, now_s)
        # Arrival times are wall-clock in vLLM; the offset to our clock is not needed, only
        # how long each call has waited.
        calls = [
            WaitingCall(
                index=index,
                recompute_tokens=request.num_tokens - self._held.tokens(request.request_id),
                waited_s=self._scheduler.waited_s(request),
            )
            for index, request in enumerate(requests)
        ]
        oldest = max(calls, key=lambda call: (call.waited_s, -call.index))
        due = self._oldest_turn.due(
            (request.request_id for request in requests),
            requests[oldest.index].request_id,
            self._admission.oldest_share,
        )
        order = held_prefix_first(calls, self._admission.ageing_s, oldest_first=due)
        if order != list(range(len(requests))):
            waiting.clear()
            waiting.extend(requests[index] for index in order)

    # --- report and apply ------------------------------------------------------------

    def apply(
        self,
        command: EngineCommand,
        resize_hot: ResizeHot | None,
        release_host: ReleaseHost | None = None,
    ) -> ApplyResult:
        """Apply a command. It is checked completely before anything changes.

        ``resize_hot`` shrinks hot buffers of running requests on the node's workers; without it a
        smaller multiplier waits for the next leases. ``release_host`` exists if the node's host
        memory is not pinned. Raises ``ValueError`` while the ledger has a violation.
        """
        began = time.perf_counter()
        if command.offload_target_blocks and not self._lends:
            raise ValueError(
                f"offload_target_blocks {command.offload_target_blocks}: copies of indexer chunks "
                "are not proved on this machine, so nothing is lent; `hisparsed status` says why"
            )
        self._shares.require_possible(command, resize_hot)
        self.host.require_possible(command, release_host)
        busy = bool(self._scheduler.running)
        self.host.apply(command, release_host, self.head_need_blocks(), busy=busy)
        self._shares.apply(command, resize_hot)
        if command.watermark == "default":
            self._default_watermark = True
        elif command.watermark is not None:
            self._default_watermark = False
            self._coordinator.transition_watermark = command.watermark
        if self._default_watermark:
            self._coordinator.transition_watermark = max(
                self._shares.blocks_a_request, self._geometry.gpu_blocks_total // 10
            )
        if command.admission is not None:
            self._admission = command.admission
            most = self.active_limit.configured
            self.active_limit.set(min(command.admission.max_running, most))
        return ApplyResult(
            offload_target_blocks=self.host.ledger.offload_target,
            lent_blocks=self._offload.lent_blocks,
            reserve_target_blocks=self.host.ledger.reserve_target,
            reserve_blocks=len(self.host.ledger.reserve_blocks),
            multiplier=self._shares.multiplier,
            lease_blocks=self._shares.lease_blocks,
            transition_watermark=self._coordinator.transition_watermark,
            admission_order=self._admission.order,
            max_running=self.active_limit.most,
            apply_us=(time.perf_counter() - began) * 1e6,
        )

    def report(
        self, now_s: float, workers: WorkerReport, release_host: ReleaseHost | None = None
    ) -> EngineReport:
        """One picture of the engine; ``workers`` is what the node's workers counted."""
        self.sessions.expire(now_s)
        # An idle engine takes no steps, so blocks that can move are moved here.
        head_need = self.head_need_blocks()
        self.host.advance(head_need, busy=bool(self._scheduler.running))
        host = self.host.figures(
            release_host, self.ghosts.hisparse_report(), self.ghosts.offload_report()
        )
        return EngineReport(
            **host._asdict(),
            geometry=self._geometry,
            head_need_blocks=head_need,
            gpu=GpuPool(
                total_blocks=self._geometry.gpu_blocks_total,
                free_blocks=self._cache_manager.block_pool.get_num_free_blocks(),
                waiting_for_blocks=self._waiting_for_blocks,
                head_need_blocks=self._gpu_head_need_blocks(),
                resident_blocks=resident_blocks(self._resident),
            ),
            requests=self._requests(),
            hot=replace(self._shares.figures(workers), scratch_blocks=self._scratch_blocks),
            requests_hot=self._shares.of_requests(workers),
            sessions=LiveSet(self.sessions.live_tokens, len(self.sessions)),
            admission=AdmissionRules(
                order=self._admission.order,
                ageing_s=self._admission.ageing_s,
                oldest_share=self._admission.oldest_share,
                max_running=self.active_limit.most,
            ),
            watermark=Watermark(self._coordinator.transition_watermark, self._default_watermark),
            progress=Progress(self._steps, self._scheduled_tokens, self._decode_time.seconds),
        )

    @property
    def resident_managers(self) -> list[CountingResidentManager]:
        """One per hot group, for the table of requests."""
        return self._resident

    def _gpu_head_need_blocks(self) -> int | None:
        waiting = self._scheduler.waiting
        return self._gpu_need.of(waiting.peek_request().request_id) if waiting else None

    def _requests(self) -> Requests:
        running, waiting = self._scheduler.get_request_counts()
        counts = {"full": 0, "mixed": 0, "none": 0}
        for request in self._scheduler.running:
            states = {manager.residency(request.request_id) for manager in self._resident}
            counts[states.pop() if len(states) == 1 else "mixed"] += 1
        return Requests(
            running=running,
            waiting=waiting,
            preemptions_total=self.preemptions,
            finished_total=self.finished,
            held_back=self._held_back,
            oldest_wait_s=self._oldest_wait_s(),
            stalls_total=self._scheduler.stall.counts.found,
            stalls_resolved_total=self._scheduler.stall.counts.resolved,
            stalls_given_up_total=self._scheduler.stall.counts.given_up,
            **counts,
        )

    def _oldest_wait_s(self) -> float | None:
        # A preempted call has run since it arrived: that is not waiting.
        waits = [
            self._scheduler.waited_s(request)
            for request in self._scheduler.waiting
            if not request.num_preemptions
        ]
        return max(waits, default=None)


class DecodeTime:
    """``query_len``: most tokens of a decoding request in one step."""

    def __init__(self, query_len: int) -> None:
        self._query_len = query_len
        self._began_s = 0.0
        self._decodes = False
        self.seconds = 0.0

    def pass_begins(self, now_s: float, running: bool) -> None:
        """``running``: whether requests of the step before still run; else the engine was idle."""
        if self._decodes and running:
            self.seconds += max(0.0, now_s - self._began_s)
        self._began_s = now_s

    def pass_ended(self, scheduled: Iterable[int]) -> None:
        """``scheduled``: tokens of each request in the step that follows this pass."""
        self._decodes = 0 < max(scheduled, default=0) <= self._query_len


class GpuNeed:
    """Watches ``cache_manager``, vLLM's KV-cache manager, from now on."""

    def __init__(self, cache_manager: Any) -> None:
        coordinator = cache_manager.coordinator
        self._manager = cache_manager
        self._count = coordinator.get_num_blocks_to_allocate
        self._allocate = cache_manager.allocate_slots
        self._counted = 0
        self._refused: tuple[str, int] | None = None
        coordinator.get_num_blocks_to_allocate = self._counting
        cache_manager.allocate_slots = self._allocating

    def of(self, request_id: str) -> int | None:
        """Blocks that ``request_id`` lacked to start; ``None`` if it was not tried."""
        if self._refused is None or self._refused[0] != request_id:
            return None
        return self._refused[1]

    def _counting(self, *args: Any, **kwargs: Any) -> int:
        self._counted = int(self._count(*args, **kwargs))
        return self._counted

    def _allocating(self, request: Any, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, reserved_blocks=reserved_blocks, **kwargs)
        if blocks is None:
            spare = reserved_blocks
            if kwargs.get("has_scheduled_reqs"):
                spare += int(self._manager.watermark_blocks)
            self._refused = request.request_id, self._counted + spare
        return blocks
