"""The engine's report and the values that it put in force, for the policy. Pure and without state.

``observe`` adds to a report what the daemon knows. ``bounded_levers``, ``confirm`` and
``cycle_sentence`` compare a command with what the engine applied, and describe it in one sentence.
Times are passed in as numbers.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from hisparsed.control.journal.records import Applied, Confirmation, Difference
from hisparsed.engine.messages import ApplyResult
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decisions import Decision, EngineCommand, LeverDecision, Reason
from hisparsed.policy.signals import (
    AdmissionRules,
    EngineReport,
    Latencies,
    Lever,
    PoolGeometry,
    Prefix,
    Snapshot,
    Tokens,
)


def observe(
    report: EngineReport,
    serving: ServingCounters,
    *,
    at_s: float,
    report_age_s: float,
    tick: int,
    policy_generation: int,
    last_admission: AdmissionRules,
    live_levers: frozenset[Lever] = frozenset(Lever),
    frozen_levers: frozenset[Lever] = frozenset(),
) -> Snapshot:
    """The snapshot of one tick. ``last_admission`` is the one last put in force; the limits that
    the API enforces are taken from it."""
    reported = {one.name: getattr(report, one.name) for one in fields(EngineReport)}
    reported["requests"] = replace(report.requests, refused_total=serving.refused)
    reported["admission"] = replace(
        last_admission,
        order=report.admission.order,
        max_running=report.admission.max_running,
    )
    return Snapshot(
        **reported,
        at_s=at_s,
        tick=tick,
        policy_generation=policy_generation,
        report_age_s=report_age_s,
        prefix=Prefix(serving.prefix_hit_tokens, serving.prefix_query_tokens),
        tokens=Tokens(serving.prompt_tokens, serving.generated_tokens),
        latencies=Latencies(
            serving.ttft_sum_s, serving.ttft_count, serving.itl_sum_s, serving.itl_count
        ),
        sampled_rows=serving.sampled_rows,
        live_levers=live_levers - _fixed_levers(report.geometry),
        frozen_levers=frozen_levers,
    )


def _fixed_levers(geometry: PoolGeometry) -> frozenset[Lever]:
    """Those that this engine cannot change."""
    live = {Lever.MULTIPLIER: geometry.hot_live, Lever.SPLIT: geometry.lends}
    return frozenset(lever for lever, can in live.items() if not can)


_SAME_MULTIPLIER = 1e-6


def bounded_levers(command: EngineCommand, result: ApplyResult) -> tuple[Difference, ...]:
    """Levers that the engine set to another value than asked, such as its own floor."""
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
    watermark = command.watermark
    if isinstance(watermark, int) and watermark != result.transition_watermark:
        found.append(Difference(Lever.WATERMARK, watermark, result.transition_watermark))
    admission = command.admission
    if admission is not None:
        if admission.order != result.admission_order:
            found.append(Difference(Lever.ADMISSION, admission.order, result.admission_order))
        elif admission.max_running != result.max_running:
            asked = f"{admission.order}, at most {admission.max_running} running"
            given = f"{result.admission_order}, at most {result.max_running} running"
            found.append(Difference(Lever.ADMISSION, asked, given))
    return tuple(found)


def confirm(tick: int, applied: Applied, report: EngineReport) -> Confirmation | None:
    """Whether the values of ``applied`` are still in force; ``None`` if it failed."""
    result, command = applied.result, applied.command
    if result is None:
        return None
    seen: list[Difference] = []
    target = report.offload.target_blocks
    if command.offload_target_blocks is not None and target != result.offload_target_blocks:
        seen.append(Difference(Lever.SPLIT, result.offload_target_blocks, target))
    reserve = report.reserve.target_blocks
    if command.reserve_target_blocks is not None and reserve != result.reserve_target_blocks:
        kept, shown = f"{result.reserve_target_blocks} in reserve", f"{reserve} in reserve"
        seen.append(Difference(Lever.SPLIT, kept, shown))
    if command.multiplier is not None and not _same(report.hot.multiplier, result.multiplier):
        seen.append(Difference(Lever.MULTIPLIER, result.multiplier, report.hot.multiplier))
    watermark = report.watermark.blocks
    if isinstance(command.watermark, int) and watermark != result.transition_watermark:
        seen.append(Difference(Lever.WATERMARK, result.transition_watermark, watermark))
    if command.admission is not None and report.admission.order != result.admission_order:
        seen.append(Difference(Lever.ADMISSION, result.admission_order, report.admission.order))
    return Confirmation(tick, tuple(seen))


def notable_levers(decision: Decision, previous: Decision | None) -> frozenset[Lever]:
    """Levers that act, hold for another reason than in the tick before, or whose last move is
    judged."""
    if previous is None:
        return frozenset(one.lever for one in decision.levers)
    return frozenset(
        one.lever
        for one in decision.levers
        if one.acts or one.outcome is not None or _said_otherwise(one, previous.of(one.lever))
    )


def _said_otherwise(now: LeverDecision, before: LeverDecision) -> bool:
    """A different reason, or in advise mode different advice."""
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
            f"The {one.lever} of tick {confirmed.tick} did not take effect: {_value(one.wanted)} "
            f"was put "
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
