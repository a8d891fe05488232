"""The demo's summary, as figures and in words. Pure: results in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hisparsed.control.journal.records import DecisionView
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import counted
from hisparsed.replay.results import ReplayResult, compare, summarise


@dataclass(frozen=True)
class NodeRun:
    """One node's replay and the decisions it took; ``engine_start_s`` is not in the replay."""

    result: ReplayResult
    decisions: tuple[DecisionView, ...]
    recomputed_tokens: int
    preemptions: int


def moves_of(run: NodeRun, lever: Lever) -> list[DecisionView]:
    """Decisions of ``lever`` that the engine carried out, oldest first."""
    acted = [one for one in run.decisions if one.lever is lever and one.acts and one.error is None]
    return sorted(acted, key=lambda one: one.at_unix_s)


def figures(run: NodeRun) -> dict[str, Any]:
    """The figures of one run, as they stand in the summary's JSON."""
    summary = summarise(run.result).to_dict()
    return {
        "requests": summary["requests"],
        "failed": summary["failed"],
        "first_error": summary["first_error"],
        "pool_moves": len(moves_of(run, Lever.SPLIT)),
        "multiplier_changes": len(moves_of(run, Lever.MULTIPLIER)),
        "admission_changes": len(moves_of(run, Lever.ADMISSION)),
        "prefix_hit_tokens": summary["prefix_hit_tokens"],
        "recomputed_tokens": run.recomputed_tokens,
        "preemptions": run.preemptions,
        "tokens_in": summary["tokens_in"],
        "tokens_out": summary["tokens_out"],
        "ttft_s": summary["ttft_s"],
        "itl_s": summary["itl_s"],
        "seconds": summary["seconds"],
    }


def summary_document(on: NodeRun, off: NodeRun) -> dict[str, Any]:
    """The demo's JSON: the run with the policy on, and ``policy_off`` beside it."""
    comparison = compare(on.result.calls, off.result.calls)
    reasons = Counter(
        f"{one.lever}:{one.code}"
        for lever in (Lever.SPLIT, Lever.MULTIPLIER, Lever.ADMISSION)
        for one in moves_of(on, lever)
    )
    return {
        **figures(on),
        "token_differences": len(comparison.differing),
        "compared": comparison.compared,
        "moves_by_reason": dict(reasons),
        "policy_off": figures(off),
    }


def in_words(document: dict[str, Any], on: NodeRun) -> str:
    """What moved, why, and what it bought; a few sentences and the moves."""
    lines = [""]
    lines.append("What moved, and why")
    for lever in (Lever.SPLIT, Lever.MULTIPLIER, Lever.ADMISSION):
        moves = moves_of(on, lever)
        if not moves:
            lines.append(f"  {lever}: no move.")
            continue
        first, last = moves[0], moves[-1]
        lines.append(
            f"  {lever}: {counted(len(moves), 'move')}, from "
            f"{_setting(first.current)} to {_setting(last.wanted)}."
        )
        lines.append(f"    first: {first.sentence}")
        if len(moves) > 1:
            lines.append(f"    last:  {last.sentence}")
    off = document["policy_off"]
    lines.append("")
    lines.append("What it bought, against the same calls with the policy off")
    lines.append(f"  {'':24}{'policy on':>14}{'policy off':>14}")
    for name, label in (
        ("requests", "calls answered"),
        ("failed", "calls failed"),
        ("seconds", "seconds"),
        ("prefix_hit_tokens", "prefix-hit tokens"),
        ("recomputed_tokens", "tokens computed"),
        ("preemptions", "preemptions"),
    ):
        lines.append(f"  {label:24}{_number(document[name]):>14}{_number(off[name]):>14}")
    lines.extend(
        f"  {'first token ' + percentile:24}"
        f"{_seconds(document['ttft_s'][percentile]):>14}"
        f"{_seconds(off['ttft_s'][percentile]):>14}"
        for percentile in ("p50", "p99")
    )
    lines.append("")
    lines.append(_verdict(document))
    if _longer_wait(document):
        lines.append(
            "The slowest calls waited longer for their first token: what no pool holds any more "
            "starts last, until it has waited for the policy's ageing time."
        )
    differing = document["token_differences"]
    lines.append(
        f"Tokens: {document['compared']} answers compared, {differing} differ"
        + ("; nothing was lost by moving." if differing == 0 else ": THIS IS A BUG.")
    )
    return "\n".join(lines)


def _verdict(document: dict[str, Any]) -> str:
    off = document["policy_off"]
    saved = 1 - document["seconds"] / off["seconds"] if off["seconds"] else 0.0
    hits, hits_off = document["prefix_hit_tokens"] or 0, off["prefix_hit_tokens"] or 0
    if saved >= 0:
        speed = f"The policy answered the same calls in {saved:.0%} less time"
    else:
        speed = f"The policy needed {-saved:.0%} more time for the same calls"
    return f"{speed} and found {hits - hits_off:+,} prefix tokens more than the fixed start."


def _longer_wait(document: dict[str, Any]) -> bool:
    on, off = document["ttft_s"]["p99"], document["policy_off"]["ttft_s"]["p99"]
    return on is not None and off is not None and on > 1.2 * off


def _setting(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _number(value: int | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def sentences(decisions: Sequence[DecisionView]) -> list[str]:
    """Live lines for decisions that act, oldest first."""
    return [
        f"{one.lever:<10} {one.code:<18} {one.sentence}"
        for one in sorted(decisions, key=lambda one: (one.tick, one.lever))
        if one.acts
    ]
