"""Fills the status document's observed part from a snapshot, a report and counters. Pure."""

from __future__ import annotations

from hisparsed.control.engine_port import ServingCounters
from hisparsed.control.status import (
    AdmissionStatus,
    EngineStatus,
    GpuStatus,
    HotStatus,
    LeverStatus,
    Observed,
    PoolsStatus,
    PoolStatus,
    RequestsStatus,
    SampledRowsStatus,
    ServingStatus,
    SessionsStatus,
    WatermarkStatus,
)
from hisparsed.engine.messages import EngineReport
from hisparsed.policy.bounds import step_blocks
from hisparsed.policy.decisions import Decision
from hisparsed.policy.memory import served_with
from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Geometry, GhostPoint, Snapshot

GHOST_STEP = 0.01
"""Share of the budget for which status and metrics show what ghost lists foretell."""


def observed_status(
    snapshot: Snapshot,
    report: EngineReport,
    serving: ServingCounters,
    *,
    failed_reports: int,
) -> Observed:
    admission, requests, hot = snapshot.admission, report.requests, report.hot
    counted, sampled = hot.counted, serving.sampled_rows
    return Observed(
        engine=EngineStatus(
            report_age_s=snapshot.report_age_s,
            report_cost_s=report.report_us / 1e6,
            failed_reports=failed_reports,
            steps=report.steps,
            ledger_violations=[f"{one.rule}: {one.sentence}" for one in report.violations],
            ledger_violations_total=report.violations_total,
            given_back_blocks_total=report.host.given_back_blocks,
        ),
        pools=pools_status(snapshot).model_copy(
            update={"released_bytes": report.host.released_bytes}
        ),
        sessions=_sessions(snapshot),
        requests=RequestsStatus(
            running=requests.running,
            waiting=requests.waiting,
            held_back=requests.held_back,
            full=requests.full,
            mixed=requests.mixed,
            none=requests.none,
            preemptions_total=requests.preemptions,
            finished_total=requests.finished,
            oldest_wait_s=requests.oldest_wait_s,
            refused_total=serving.refused,
            stalls_total=requests.stalls_found,
            stalls_resolved_total=requests.stalls_resolved,
            stalls_given_up_total=requests.stalls_given_up,
        ),
        hot=HotStatus(
            multiplier=hot.multiplier,
            lease_blocks=hot.lease_blocks,
            leased_requests=hot.leased_requests,
            leased_blocks=hot.leased_blocks,
            references_total=hot.references if counted else None,
            resident_total=hot.resident if counted else None,
            hits_total=hot.hits if counted else None,
            loads_total=hot.loads if counted else None,
            h2d_bytes_total=hot.h2d_bytes if counted else None,
            miss_curve=hot.miss_curve,
            individual_leases=hot.individual_leases,
            sampled=SampledRowsStatus(
                hits_total=sampled.hits,
                misses_total=sampled.misses,
                h2d_bytes_total=sampled.h2d_bytes,
                age_s=sampled.age_s,
            )
            if sampled is not None
            else None,
        ),
        gpu=GpuStatus(
            total_blocks=snapshot.gpu.total_blocks,
            free_blocks=snapshot.gpu.free_blocks,
            resident_blocks=report.gpu_resident_blocks,
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
            prompt_tokens_total=serving.prompt_tokens,
            generated_tokens_total=serving.generated_tokens,
            prefix_query_tokens_total=serving.prefix_query_tokens,
            prefix_hit_tokens_total=serving.prefix_hit_tokens,
            mean_ttft_s=_mean(serving.ttft_sum_s, serving.ttft_count),
            mean_itl_s=_mean(serving.itl_sum_s, serving.itl_count),
            ttft_sum_s=serving.ttft_sum_s,
            ttft_count=serving.ttft_count,
            itl_sum_s=serving.itl_sum_s,
            itl_count=serving.itl_count,
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
