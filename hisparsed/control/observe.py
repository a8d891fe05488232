"""Translates between the engine and the policy; pure, and keeps nothing.

``observe`` makes the policy's snapshot of a report, ``command_for`` the engine's command of a
decision. ``bounded``, ``confirm`` and ``cycle_sentence`` compare a command with what the engine put
in force, and say so in one sentence. Times come in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hisparsed.control.journal.records import Applied, Confirmation, Difference
from hisparsed.engine.messages import (
    AdmissionCommand,
    AdmissionOrder,
    ApplyResult,
    EngineCommand,
    EngineReport,
    GeometryReport,
    GhostReport,
    RequestHotReport,
)
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decisions import Commands, Decision, LeverDecision, Reason
from hisparsed.policy.signals import (
    Admission,
    Geometry,
    GhostPoint,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    LeasePoint,
    Lever,
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


_SAME_MULTIPLIER = 1e-6


def bounded(command: EngineCommand, result: ApplyResult) -> tuple[Difference, ...]:
    """Levers that the engine put elsewhere than asked, such as at its own floor."""
    found: list[Difference] = []
    target = command.offload_target_blocks
    if target is not None and target != result.offload_target_blocks:
        found.append(Difference(Lever.SPLIT, target, result.offload_target_blocks))
    reserve = command.reserve_target_blocks
    if reserve is not None and reserve != result.reserve_target_blocks:
        asked, given = f"{reserve} in reserve", f"{result.reserve_target_blocks} in reserve"
        found.append(Difference(Lever.SPLIT, asked, given))
    multiplier = command.multiplier
    if multiplier is not None and not _same(multiplier, result.multiplier):
        found.append(Difference(Lever.MULTIPLIER, multiplier, result.multiplier))
    watermark = command.transition_watermark
    if isinstance(watermark, int) and watermark != result.transition_watermark:
        found.append(Difference(Lever.WATERMARK, watermark, result.transition_watermark))
    admission = command.admission
    if admission is not None:
        if admission.order != result.admission_order:
            found.append(Difference(Lever.ADMISSION, admission.order, result.admission_order))
        elif admission.max_running not in (None, result.max_running):
            asked = f"{admission.order}, at most {admission.max_running} running"
            given = f"{result.admission_order}, at most {result.max_running} running"
            found.append(Difference(Lever.ADMISSION, asked, given))
    return tuple(found)


def confirm(tick: int, applied: Applied, report: EngineReport) -> Confirmation | None:
    """Whether what ``applied`` put in force still is; ``None`` when it had failed."""
    result, command = applied.result, applied.command
    if result is None:
        return None
    seen: list[Difference] = []
    target = report.host.offload_target_blocks
    if command.offload_target_blocks is not None and target != result.offload_target_blocks:
        seen.append(Difference(Lever.SPLIT, result.offload_target_blocks, target))
    reserve = report.host.reserve_target_blocks
    if command.reserve_target_blocks is not None and reserve != result.reserve_target_blocks:
        kept, shown = f"{result.reserve_target_blocks} in reserve", f"{reserve} in reserve"
        seen.append(Difference(Lever.SPLIT, kept, shown))
    if command.multiplier is not None and not _same(report.hot.multiplier, result.multiplier):
        seen.append(Difference(Lever.MULTIPLIER, result.multiplier, report.hot.multiplier))
    watermark = report.transition_watermark
    if isinstance(command.transition_watermark, int) and watermark != result.transition_watermark:
        seen.append(Difference(Lever.WATERMARK, result.transition_watermark, watermark))
    if command.admission is not None and report.admission_order != result.admission_order:
        seen.append(Difference(Lever.ADMISSION, result.admission_order, report.admission_order))
    return Confirmation(tick, tuple(seen))


def notable_levers(decision: Decision, previous: Decision | None) -> frozenset[Lever]:
    """Levers that act, or hold for another reason than in the tick before."""
    if previous is None:
        return frozenset(one.lever for one in decision.levers)
    return frozenset(
        one.lever
        for one in decision.levers
        if one.acts or _said_otherwise(one, previous.of(one.lever))
    )


def _said_otherwise(now: LeverDecision, before: LeverDecision) -> bool:
    """Another reason, or other advice: in advise mode the advice is the news."""
    if now.reason is not before.reason:
        return True
    advice = (now.cause, now.wanted)
    return now.reason is Reason.ADVISE_ONLY and advice != (before.cause, before.wanted)


def cycle_sentence(
    decision: Decision,
    notable: frozenset[Lever],
    applied: Applied | None,
    confirmed: Confirmation | None,
) -> str | None:
    """One line on what changed in this tick: moves first; ``None`` when nothing did."""
    acting = [one for one in decision.levers if one.acts]
    parts = [_with_outcome(one, applied) for one in acting]
    if not acting:
        parts += [one.sentence for one in decision.levers if one.lever in notable]
    if confirmed is not None:
        parts += [
            f"The {one.lever} of tick {confirmed.tick} did not stay: {_value(one.wanted)} was put "
            f"in force and the engine reports {_value(one.found)}."
            for one in confirmed.differences
        ]
    return " ".join(parts) or None


def _with_outcome(lever: LeverDecision, applied: Applied | None) -> str:
    if applied is None:
        return lever.sentence
    if applied.error is not None:
        return f"{lever.sentence} It failed: {applied.error}."
    for one in applied.bounded:
        if one.lever is lever.lever:
            return f"{lever.sentence} The engine bounded it to {_value(one.found)}."
    return lever.sentence


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=_SAME_MULTIPLIER)


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
