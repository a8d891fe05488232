"""From what the engine and the API side tell to the policy's snapshot, and back to a command.

Pure: times come in as numbers. Judges nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hisparsed.control.engine_port import ServingCounters
from hisparsed.engine.messages import (
    AdmissionCommand,
    AdmissionOrder,
    EngineCommand,
    EngineReport,
    GeometryReport,
    GhostReport,
    RequestHotReport,
)
from hisparsed.policy.decisions import Commands
from hisparsed.policy.reasons import Lever
from hisparsed.policy.signals import (
    Admission,
    Geometry,
    GhostPoint,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    LeasePoint,
    MissPoint,
    OffloadPool,
    Prefix,
    Progress,
    RequestHot,
    Requests,
    Reserve,
    Sessions,
    Snapshot,
    Tokens,
    Watermark,
)
from hisparsed.policy.signals import AdmissionOrder as PolicyOrder


def geometry_of(report: GeometryReport) -> Geometry:
    """Raises ``ValueError`` naming the field when the engine reports an impossible size."""
    return Geometry(
        block_tokens=report.block_tokens,
        host_block_bytes=report.host_block_bytes,
        offload_chunk_tokens=report.chunk_tokens,
        offload_chunk_bytes=report.chunk_bytes,
        offload_copies=report.offload_copies,
        chunks_per_host_block=report.chunks_per_host_block,
        budget_blocks=report.budget_blocks,
        max_model_len=report.max_model_len,
        topk=report.topk,
        decode_query_len=report.decode_query_len,
        gpu_blocks_total=report.gpu_blocks,
        hot_block_rows=report.block_tokens,
        hot_groups=report.hot_groups,
        max_lease_blocks=report.max_lease_blocks,
        max_num_seqs=report.max_num_seqs,
        row_bytes=report.row_bytes,
        min_lease_rows=report.min_lease_rows,
        max_step_tokens=report.max_step_tokens,
        hot_live=report.hot_live,
    )


def admission_in_force(report: EngineReport, last: Admission) -> Admission:
    """Order and ``max_running`` as reported; what only the API side enforces from ``last``."""
    order = PolicyOrder(report.admission_order)
    return replace(last, order=order, max_running=report.max_running)


def observe(
    report: EngineReport,
    serving: ServingCounters,
    *,
    at_s: float,
    report_age_s: float,
    tick: int,
    policy_generation: int,
    last_admission: Admission,
    live_levers: frozenset[Lever] = frozenset(Lever),
    frozen_levers: frozenset[Lever] = frozenset(),
) -> Snapshot:
    """The snapshot of one tick. ``last_admission`` is what was last put in force."""
    geometry = geometry_of(report.geometry)
    host, requests, hot = report.host, report.requests, report.hot
    return Snapshot(
        at_s=at_s,
        tick=tick,
        policy_generation=policy_generation,
        report_age_s=report_age_s,
        geometry=geometry,
        hisparse=HiSparsePool(
            capacity_blocks=host.hisparse_capacity_blocks,
            target_blocks=geometry.budget_blocks
            - host.offload_target_blocks
            - host.reserve_target_blocks,
            in_use_blocks=host.hisparse_in_use_blocks,
            cached_blocks=host.hisparse_cached_blocks,
            free_blocks=max(0, host.hisparse_idle_blocks - host.hisparse_cached_blocks),
            ghost=_ghost(host.hisparse_ghost),
        ),
        offload=OffloadPool(
            capacity_chunks=host.lent_blocks * geometry.chunks_per_host_block,
            target_blocks=host.offload_target_blocks,
            lent_blocks=host.lent_blocks,
            in_use_chunks=host.offload_in_flight_chunks,
            stored_chunks=host.offload_stored_chunks,
            ghost=_ghost(host.offload_ghost),
        ),
        pending_blocks=host.pending_blocks,
        draining_blocks=host.draining_blocks,
        head_need_blocks=host.head_need_blocks,
        gpu=GpuPool(
            geometry.gpu_blocks_total,
            report.gpu_free_blocks,
            report.waiting_for_blocks,
            report.gpu_head_need_blocks,
        ),
        requests=Requests(
            running=requests.running,
            waiting=requests.waiting,
            preemptions_total=requests.preemptions,
            full=requests.full,
            mixed=requests.mixed,
            none=requests.none,
            finished_total=requests.finished,
            held_back=requests.held_back,
            refused_total=serving.refused,
            oldest_wait_s=requests.oldest_wait_s,
        ),
        hot=HotBuffers(
            multiplier=hot.multiplier,
            references_total=hot.references,
            hits_total=hot.hits,
            loads_total=hot.loads,
            resident_total=hot.resident,
            h2d_bytes_total=hot.h2d_bytes,
            predicted=tuple(
                MissPoint(point.multiplier, point.misses)
                for point in hot.miss_curve
                if point.multiplier * geometry.topk >= geometry.least_lease_rows
            ),
            counted=hot.counted,
            individual_leases=hot.individual_leases,
        ),
        sessions=Sessions(report.live_set_tokens, report.live_sessions),
        prefix=Prefix(serving.prefix_hit_tokens, serving.prefix_query_tokens),
        tokens=Tokens(serving.prompt_tokens, serving.generated_tokens),
        admission=admission_in_force(report, last_admission),
        watermark=Watermark(report.transition_watermark, report.default_watermark),
        progress=Progress(report.steps, report.scheduled_tokens, report.decode_seconds),
        requests_hot=tuple(_request_hot(one) for one in hot.requests),
        reserve=Reserve(
            host.reserve_target_blocks,
            host.reserve_blocks,
            host.release == "possible",
            host.release_wanted,
        ),
        live_levers=live_levers if geometry.hot_live else live_levers - {Lever.MULTIPLIER},
        frozen_levers=frozen_levers,
    )


def _ghost(points: Sequence[GhostReport]) -> tuple[GhostPoint, ...]:
    return tuple(GhostPoint(point.extra_blocks, point.tokens) for point in points)


def _request_hot(report: RequestHotReport) -> RequestHot:
    curve = tuple(LeasePoint(point.blocks, point.misses_per_step) for point in report.curve)
    return RequestHot(report.request_id, report.lease_blocks, report.target_blocks, curve)


def command_for(commands: Commands) -> EngineCommand | None:
    """What the engine must be told; ``None`` when nothing changes.

    Limits on waiting sessions are not in it: the API side enforces them.
    """
    if not commands:
        return None
    admission = commands.admission
    engine_admission = None
    if admission is not None:
        order: AdmissionOrder = (
            "held-prefix-first" if admission.order is PolicyOrder.HELD_PREFIX_FIRST else "arrival"
        )
        engine_admission = AdmissionCommand(
            order=order,
            ageing_s=admission.ageing_s,
            oldest_share=admission.oldest_share,
            max_running=admission.max_running,
        )
    return EngineCommand(
        offload_target_blocks=commands.offload_target_blocks,
        reserve_target_blocks=commands.reserve_target_blocks,
        release_reserve=commands.release_reserve,
        hot_leases=None if commands.hot_leases is None else dict(commands.hot_leases),
        multiplier=commands.multiplier,
        transition_watermark=commands.watermark,
        admission=engine_admission,
    )
