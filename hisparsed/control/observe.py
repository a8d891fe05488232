"""From what the engine and the API side tell to the policy's snapshot, and back to a command.

Pure: times come in as numbers. Judges nothing and keeps nothing.
"""

from __future__ import annotations

from hisparsed.control.engine_port import ServingCounters
from hisparsed.engine.messages import (
    AdmissionCommand,
    AdmissionOrder,
    EngineCommand,
    EngineReport,
    GeometryReport,
)
from hisparsed.policy.decisions import Commands
from hisparsed.policy.reasons import Lever
from hisparsed.policy.signals import (
    Admission,
    Geometry,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    MissPoint,
    OffloadPool,
    Prefix,
    Requests,
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
    )


def admission_in_force(report: EngineReport, last: Admission) -> Admission:
    """Order and ``max_running`` as reported; what only the API side enforces from ``last``."""
    return Admission(
        order=PolicyOrder(report.admission_order),
        ageing_s=last.ageing_s,
        max_running=report.max_running,
        max_waiting_sessions=last.max_waiting_sessions,
        retry_after_s=last.retry_after_s,
    )


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
            target_blocks=geometry.budget_blocks - host.offload_target_blocks,
            in_use_blocks=host.hisparse_in_use_blocks,
            cached_blocks=host.hisparse_cached_blocks,
            free_blocks=max(0, host.hisparse_idle_blocks - host.hisparse_cached_blocks),
        ),
        offload=OffloadPool(
            capacity_chunks=host.lent_blocks * geometry.chunks_per_host_block,
            target_blocks=host.offload_target_blocks,
            lent_blocks=host.lent_blocks,
            in_use_chunks=host.offload_in_flight_chunks,
            stored_chunks=host.offload_stored_chunks,
        ),
        pending_blocks=host.pending_blocks,
        draining_blocks=host.draining_blocks,
        head_need_blocks=host.head_need_blocks,
        gpu=GpuPool(geometry.gpu_blocks_total, report.gpu_free_blocks, report.waiting_for_blocks),
        requests=Requests(
            running=requests.running,
            waiting=requests.waiting,
            preemptions_total=requests.preemptions,
            full=requests.full,
            mixed=requests.mixed,
            none=requests.none,
            finished_total=requests.finished,
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
                if point.multiplier >= 1
            ),
        ),
        sessions=Sessions(report.live_set_tokens, report.live_sessions),
        prefix=Prefix(serving.prefix_hit_tokens, serving.prefix_query_tokens),
        tokens=Tokens(serving.prompt_tokens, serving.generated_tokens),
        admission=admission_in_force(report, last_admission),
        watermark=Watermark(report.transition_watermark, report.default_watermark),
        live_levers=live_levers,
        frozen_levers=frozen_levers,
    )


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
            order=order, ageing_s=admission.ageing_s, max_running=admission.max_running
        )
    return EngineCommand(
        offload_target_blocks=commands.offload_target_blocks,
        multiplier=commands.multiplier,
        transition_watermark=commands.watermark,
        admission=engine_admission,
    )
