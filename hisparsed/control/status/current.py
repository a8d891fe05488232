"""The node's status now: the loop hands in each finished tick, everything else reads.

``CurrentStatus.status`` builds the document from the last tick and the parts around it; ``unready``
says why the node should get no requests. Keeps the latest tick only: ``history`` and the journal
have the past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hisparsed.control.events import Broadcast, Message
from hisparsed.control.holds import Overrides
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import TickRecord, view_tick
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.document import (
    AdmissionStatus,
    BackgroundStatus,
    CanaryStatus,
    DoctorStatus,
    EngineLifeStatus,
    EngineState,
    EngineStatus,
    GpuStatus,
    HotStatus,
    JournalStatus,
    LeverStatus,
    Lifecycle,
    LoopStatus,
    MissCurvePoint,
    NodeInfo,
    Observed,
    PolicyStatus,
    PoolsStatus,
    PoolStatus,
    RequestsStatus,
    SampledRowsStatus,
    ScheduleStatus,
    ServingStatus,
    SessionsStatus,
    Status,
    WatermarkStatus,
)
from hisparsed.engine.gpus import GpusStatus
from hisparsed.policy.bounds import step_blocks
from hisparsed.policy.decisions import Decision, Reason
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.memory import served_with
from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Geometry, GhostPoint, Lever, Snapshot


def schedule_statuses(source: PolicySource) -> list[ScheduleStatus]:
    active = source.in_force.active
    return [
        ScheduleStatus(name=entry.name, active=index in active)
        for index, entry in enumerate(source.active.value.schedules)
    ]


GHOST_STEP = 0.01
"""Share of the budget for which status and metrics show what ghost lists foretell."""


def observed_status(snapshot: Snapshot, *, failed_reports: int) -> Observed:
    admission, requests, hot = snapshot.admission, snapshot.requests, snapshot.hot
    counted, sampled, latencies = hot.counted, snapshot.sampled_rows, snapshot.latencies
    ledger = snapshot.ledger
    return Observed(
        engine=EngineStatus(
            report_age_s=snapshot.report_age_s,
            report_cost_s=snapshot.report_cost_s,
            failed_reports=failed_reports,
            steps=snapshot.progress.steps_total if snapshot.progress is not None else 0,
            ledger_violations=[f"{one.rule}: {one.sentence}" for one in ledger.violations],
            ledger_violations_total=ledger.violations_total,
            given_back_blocks_total=ledger.given_back_blocks_total,
        ),
        pools=pools_status(snapshot),
        sessions=_sessions(snapshot),
        requests=RequestsStatus(
            running=requests.running,
            waiting=requests.waiting,
            held_back=requests.held_back or 0,
            full=requests.full,
            mixed=requests.mixed,
            none=requests.none,
            preemptions_total=requests.preemptions_total,
            finished_total=requests.finished_total,
            oldest_wait_s=requests.oldest_wait_s,
            refused_total=requests.refused_total,
            stalls_total=requests.stalls_total,
            stalls_resolved_total=requests.stalls_resolved_total,
            stalls_given_up_total=requests.stalls_given_up_total,
        ),
        hot=HotStatus(
            multiplier=hot.multiplier,
            lease_blocks=hot.lease_blocks,
            leased_requests=hot.leased_requests,
            leased_blocks=hot.leased_blocks,
            references_total=hot.references_total if counted else None,
            resident_total=hot.resident_total if counted else None,
            hits_total=hot.hits_total if counted else None,
            loads_total=hot.loads_total if counted else None,
            h2d_bytes_total=hot.h2d_bytes_total if counted else None,
            miss_curve=[
                MissCurvePoint(multiplier=one.multiplier, misses=one.miss_fraction)
                for one in hot.predicted
            ],
            individual_leases=hot.individual_leases,
            sampled=SampledRowsStatus(
                hits_total=sampled.hits_total,
                misses_total=sampled.misses_total,
                h2d_bytes_total=sampled.h2d_bytes_total,
                age_s=sampled.age_s,
            )
            if sampled is not None
            else None,
        ),
        gpu=GpuStatus(
            total_blocks=snapshot.gpu.total_blocks,
            free_blocks=snapshot.gpu.free_blocks,
            resident_blocks=snapshot.gpu.resident_blocks,
            hot_blocks=hot.leased_blocks,
            waiting_for_blocks=snapshot.gpu.waiting_for_blocks,
            head_need_blocks=snapshot.gpu.head_need_blocks,
        ),
        admission=AdmissionStatus(
            order=admission.order,
            ageing_s=admission.ageing_s,
            max_running=admission.max_running,
            max_waiting_sessions=admission.max_waiting_sessions,
            retry_after_s=admission.retry_after_s,
        ),
        watermark=WatermarkStatus(
            blocks=snapshot.watermark.blocks, is_default=snapshot.watermark.is_default
        ),
        serving=ServingStatus(
            prompt_tokens_total=snapshot.tokens.prompt_total,
            generated_tokens_total=snapshot.tokens.generated_total,
            prefix_query_tokens_total=snapshot.prefix.query_tokens_total,
            prefix_hit_tokens_total=snapshot.prefix.hit_tokens_total,
            mean_ttft_s=_mean(latencies.ttft_sum_s, latencies.ttft_count),
            mean_itl_s=_mean(latencies.itl_sum_s, latencies.itl_count),
            ttft_sum_s=latencies.ttft_sum_s,
            ttft_count=latencies.ttft_count,
            itl_sum_s=latencies.itl_sum_s,
            itl_count=latencies.itl_count,
        ),
    )


def pools_status(snapshot: Snapshot) -> PoolsStatus:
    """Both pools in bytes. A stored chunk counts with all its copies and padding."""
    geometry, hisparse, offload = snapshot.geometry, snapshot.hisparse, snapshot.offload
    block, reach = geometry.host_block_bytes, reach_now(snapshot)
    chunk = geometry.offload_chunk_bytes * geometry.offload_copies
    return PoolsStatus(
        budget_bytes=geometry.budget_blocks * block,
        host_block_bytes=block,
        hisparse=PoolStatus(
            target_bytes=hisparse.target_blocks * block,
            capacity_bytes=hisparse.capacity_blocks * block,
            in_use_bytes=hisparse.in_use_blocks * block,
            cached_bytes=hisparse.cached_blocks * block,
            reach_tokens=reach.hisparse_tokens,
            target_blocks=hisparse.target_blocks,
            capacity_blocks=hisparse.capacity_blocks,
            ghost_tokens_total=_ghost_tokens(snapshot.geometry, hisparse.ghost),
        ),
        offload=PoolStatus(
            target_bytes=offload.target_blocks * block,
            capacity_bytes=offload.lent_blocks * block,
            in_use_bytes=offload.in_use_chunks * chunk,
            cached_bytes=max(0, offload.stored_chunks - offload.in_use_chunks) * chunk,
            reach_tokens=reach.offload_tokens,
            target_blocks=offload.target_blocks,
            capacity_blocks=offload.lent_blocks,
            ghost_tokens_total=_ghost_tokens(snapshot.geometry, offload.ghost),
        ),
        pending_bytes=snapshot.pending_blocks * block,
        draining_bytes=snapshot.draining_blocks * block,
        reserve_bytes=snapshot.reserve.blocks * block,
        reserve_target_bytes=snapshot.reserve.target_blocks * block,
        released_bytes=snapshot.reserve.released_bytes,
    )


def lever_statuses(
    policy: Policy, decision: Decision, frozen: frozenset[Lever]
) -> list[LeverStatus]:
    return [
        LeverStatus(
            lever=one.lever,
            mode=policy.mode_of(one.lever),
            frozen=one.lever in frozen,
            pending_restart=one.reason is Reason.PENDING_RESTART,
            current=one.current,
            wanted=one.wanted,
            reason=one.reason,
            limited_by=one.limited_by,
            sentence=one.sentence,
        )
        for one in decision.levers
    ]


def _sessions(snapshot: Snapshot) -> SessionsStatus:
    reach = reach_now(snapshot)
    load = live_load(snapshot, reach)
    return SessionsStatus(
        live=snapshot.sessions.live_sessions,
        live_set_tokens=snapshot.sessions.live_set_tokens,
        min_reach_tokens=reach.min_tokens,
        coverage=1 / load if load > 0 else None,
    )


def _ghost_tokens(geometry: Geometry, points: tuple[GhostPoint, ...]) -> int | None:
    tokens = served_with(points, step_blocks(geometry, GHOST_STEP))
    return None if tokens is None else int(tokens)


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


_EVENTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """One finished tick. ``policy`` has the operator's overrides in it."""

    record: TickRecord
    policy: Policy
    reported_at_s: float
    tick_s: float
    stalled: str | None = None
    """That calls stand still though memory is free, with the figures; ``None`` when they move."""


OnTick = Callable[[TickOutcome], None]


@dataclass(slots=True)
class LoopCounters:
    """Of all control loops of this daemon, one after the other."""

    failed_reports: int = 0
    failed_applies: int = 0
    failed_ticks: int = 0
    late_ticks: int = 0


@dataclass(frozen=True, slots=True)
class StatusSources:
    """What the status shows beside the loop's own. The defaults: a node that has none of it."""

    lifecycle: Callable[[], Lifecycle] = lambda: Lifecycle.SERVING
    engine: Callable[[], EngineLifeStatus | None] = lambda: None
    canary: Callable[[], CanaryStatus | None] = lambda: None
    """``None`` while no engine serves."""
    doctor: Callable[[], DoctorStatus | None] = lambda: None
    gpus: Callable[[], GpusStatus | None] = lambda: None
    background: Callable[[], list[BackgroundStatus]] = list
    not_kept: Callable[[], list[str]] = list
    """Files of the state folder that cannot be written, and why."""
    node_pending: Callable[[], tuple[PendingRestart, ...]] = tuple
    """What the node's document says now, where it is not what runs."""
    on_tick: Callable[[], Iterable[OnTick]] = tuple
    """Who is called with a finished tick, in this order; asked at each tick."""


class CurrentStatus:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(
        self,
        node: NodeInfo,
        source: PolicySource,
        overrides: Overrides,
        journal: Journal,
        broadcast: Broadcast,
        sources: StatusSources,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.counters = LoopCounters()
        self._source = source
        self._overrides = overrides
        self._journal = journal
        self._broadcast = broadcast
        self._sources = sources
        self._clock = clock
        self._wall_clock = wall_clock
        self._last: TickOutcome | None = None
        self._said: tuple[str, float] | None = None

    @property
    def lifecycle(self) -> Lifecycle:
        return self._sources.lifecycle()

    def show(self, outcome: TickOutcome) -> None:
        """Take in a finished tick and tell the listeners.

        Raises what one of ``on_tick`` raised, when all have had the tick.
        """
        self._last = outcome
        record = outcome.record
        if record.sentence is not None:
            self._said = (record.sentence, record.at_unix_s)
        failed: Exception | None = None
        for watch in self._sources.on_tick():
            try:
                watch(outcome)
            except Exception as error:
                failed = failed or error
        self._send(record)
        if failed is not None:
            raise failed

    def _send(self, record: TickRecord) -> None:
        if not self._broadcast.listeners:
            return
        notable = [view.model_dump_json() for view in view_tick(record) if view.notable]
        if notable:
            self._broadcast.send(Message("decisions", f"[{','.join(notable)}]"))
        self._broadcast.send(Message("status", self.status().model_dump_json()))

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the engine last reported; ``None`` before the first tick."""
        return None if self._last is None else self._clock() - self._last.reported_at_s

    def unready(self) -> str | None:
        """Why the node should get no requests; ``None`` when it should."""
        engine = self._sources.engine()
        if self.lifecycle is not Lifecycle.SERVING:
            why = f": {engine.sentence}" if engine is not None else ""
            return f"the node is {self.lifecycle}{why}"
        if engine is not None and engine.state is not EngineState.SERVING:
            return engine.sentence
        age_s, limit_s = self.report_age_s, self._source.in_force.policy.stale_after
        if age_s is None:
            return "the engine has not reported yet"
        if age_s > limit_s:
            return f"the engine reported {age_s:.1f}s ago, over {limit_s:g}s"
        if self._last is not None and self._last.stalled is not None:
            return self._last.stalled
        canary = self._sources.canary()
        if canary is not None and canary.not_ready:
            return f"the canary answered otherwise: {canary.sentence}"
        return None

    def pending_restart(self) -> list[PendingRestart]:
        """Values of the policy and of the node's document that only a restart puts in force."""
        return [*self._source.pending_restart(), *self._sources.node_pending()]

    def status(self) -> Status:
        """The document of this moment; the report's age is of now, not of the last tick."""
        last, said, health = self._last, self._said, self._journal.health
        active = self._source.active
        frozen = self._overrides.frozen
        return Status(
            at_unix_s=self._wall_clock(),
            node=self.node,
            lifecycle=self.lifecycle,
            observed=self._observed(last) if last is not None else None,
            levers=lever_statuses(last.policy, last.record.decision, frozen) if last else [],
            policy=PolicyStatus(
                path=str(active.path),
                generation=active.generation,
                content_hash=active.content_hash,
                mode=self._source.in_force.policy.mode,
                overridden=dict(self._overrides.modes),
                frozen=[lever for lever in Lever if lever in frozen],
                reload_failures=self._source.reload_failures,
                last_error=self._source.last_error,
                overrides=list(self._source.overrides),
                schedules=schedule_statuses(self._source),
                pending_restart=self.pending_restart(),
            ),
            loop=LoopStatus(
                tick=last.record.decision.tick if last else 0,
                tick_s=self._source.in_force.policy.tick,
                last_tick_s=last.tick_s if last else 0.0,
                late_ticks=self.counters.late_ticks,
                failed_applies=self.counters.failed_applies,
                failed_ticks=self.counters.failed_ticks,
            ),
            journal=JournalStatus(
                writing=health.error is None,
                error=health.error,
                written=health.written,
                dropped=health.dropped,
            ),
            last_sentence=said[0] if said else None,
            last_sentence_unix_s=said[1] if said else None,
            events=self._journal.recent_events(_EVENTS_SHOWN),
            stalled=last.stalled if last else None,
            canary=self._sources.canary(),
            doctor=self._sources.doctor(),
            engine=self._sources.engine(),
            gpus=self._sources.gpus(),
            not_kept=self._sources.not_kept(),
            background=self._sources.background(),
        )

    def _observed(self, last: TickOutcome) -> Observed:
        observed = observed_status(
            last.record.snapshot, failed_reports=self.counters.failed_reports
        )
        age_s = self._clock() - last.reported_at_s
        engine = observed.engine.model_copy(update={"report_age_s": age_s})
        return observed.model_copy(update={"engine": engine})
