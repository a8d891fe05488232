"""The demo's summary, as figures and in words. Pure: results in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hisparsed.control.journal.records import DecisionView
from hisparsed.demo.origin import Origin
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import counted
from hisparsed.replay.results import ReplayResult, compare, summarise

LEAST_DIFFERENCE = 0.1
"""Two equal nodes on one machine differ by less than this in the time that they take."""
LEAST_CALLS_A_SESSION = 3
"""With fewer, most of the tokens computed were never held, whatever the policy."""


@dataclass(frozen=True)
class Sizing:
    """The load, fixed before it is sent. ``calls`` are those of one node.

    ``tokens_per_s``: prompt tokens that each node computes per second while the other runs too.
    """

    calls: int
    concurrency: int
    load: float
    tokens_per_s: float

    @property
    def tells(self) -> bool:
        """Whether there are enough calls to compare two policies."""
        return self.calls >= LEAST_CALLS_A_SESSION * self.concurrency


@dataclass(frozen=True)
class NodeRun:
    """One node's replay, the decisions it took, and its ``/v1/history`` at the end."""

    result: ReplayResult
    decisions: tuple[DecisionView, ...]
    history: dict[str, Any]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no pool held."""
        answered = [call for call in self.result.calls if call.error is None]
        return sum(call.prompt_tokens - (call.prefix_hit_tokens or 0) for call in answered)


@dataclass(frozen=True)
class Comparison:
    """The same calls on two nodes, from ``began_unix_s`` on."""

    sizing: Sizing
    on: NodeRun
    off: NodeRun
    began_unix_s: float
    origin: Origin


class Verdict(StrEnum):
    """The result of the comparison, by the time that all calls took."""

    GAIN = "gain"
    NO_DIFFERENCE = "no-difference"
    LOSS = "loss"
    TOO_FEW_CALLS = "too-few-calls"


def verdict_of(comparison: Comparison) -> Verdict:
    """A pure function of sizes and times."""
    if not comparison.sizing.tells:
        return Verdict.TOO_FEW_CALLS
    saved = _saved(comparison)
    if abs(saved) < LEAST_DIFFERENCE:
        return Verdict.NO_DIFFERENCE
    return Verdict.GAIN if saved > 0 else Verdict.LOSS


def _saved(comparison: Comparison) -> float:
    """Share of the time that the policy saved."""
    off_s = comparison.off.result.seconds
    return 1 - comparison.on.result.seconds / off_s if off_s else 0.0


def moves_of(run: NodeRun, lever: Lever) -> list[DecisionView]:
    """Decisions of ``lever`` that the engine carried out, oldest first."""
    acted = [one for one in run.decisions if one.lever is lever and one.acts and one.error is None]
    return sorted(acted, key=lambda one: one.at_unix_s)


def figures(run: NodeRun) -> dict[str, Any]:
    """The figures of one run, as in the summary's JSON."""
    summary = summarise(run.result).to_dict()
    return {
        "requests": summary["requests"],
        "failed": summary["failed"],
        "first_error": summary["first_error"],
        "pool_moves": len(moves_of(run, Lever.SPLIT)),
        "multiplier_changes": len(moves_of(run, Lever.MULTIPLIER)),
        "admission_changes": len(moves_of(run, Lever.ADMISSION)),
        "prefix_hit_tokens": summary["prefix_hit_tokens"],
        "recomputed_tokens": run.computed_tokens,
        "preemptions": run.result.preemptions or 0,
        "tokens_in": summary["tokens_in"],
        "tokens_out": summary["tokens_out"],
        "ttft_s": summary["ttft_s"],
        "itl_s": summary["itl_s"],
        "seconds": summary["seconds"],
        "calls_per_s": summary["requests"] / summary["seconds"] if summary["seconds"] else 0.0,
    }


def summary_document(comparison: Comparison) -> dict[str, Any]:
    """The demo's JSON: the run with the policy on, and the other run as ``policy_off``."""
    on, off, sizing = comparison.on, comparison.off, comparison.sizing
    answers = compare(on.result.calls, off.result.calls)
    reasons = Counter(f"{one.lever}:{one.code}" for lever in _LEVERS for one in moves_of(on, lever))
    return {
        **figures(on),
        "token_differences": len(answers.differing),
        "compared": answers.compared,
        "moves_by_reason": dict(reasons),
        "policy_off": figures(off),
        "verdict": verdict_of(comparison),
        "load": sizing.load,
        "sessions_at_a_time": sizing.concurrency,
        "tokens_per_s": sizing.tokens_per_s,
    }


_LEVERS = (Lever.SPLIT, Lever.MULTIPLIER, Lever.ADMISSION)


def in_words(comparison: Comparison) -> str:
    """The moves with their reasons, the table and the result."""
    return "\n".join(["", *_moves(comparison.on), "", *_compared(comparison)])


def _moves(on: NodeRun) -> Iterator[str]:
    yield "Moves of the policy"
    for lever in _LEVERS:
        moves = moves_of(on, lever)
        if not moves:
            yield f"  {lever}: no move."
            continue
        first, last = moves[0], moves[-1]
        yield (
            f"  {lever}: {counted(len(moves), 'move')}, from "
            f"{_setting(first.current)} to {_setting(last.wanted)}."
        )
        yield f"    first: {first.sentence}"
        if len(moves) > 1:
            yield f"    last:  {last.sentence}"


def _compared(comparison: Comparison) -> Iterator[str]:
    yield "The same calls with the policy on and with it off, at the same time on this machine"
    yield f"  {'':24}{'policy on':>14}{'policy off':>14}"
    for label, on, off in table_rows(comparison):
        yield f"  {label:24}{on:>14}{off:>14}"
    yield ""
    yield from conclusion(comparison)


def table_rows(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Each figure's name, and its value with the policy on and off."""
    on, off = figures(comparison.on), figures(comparison.off)
    for name, label, written in (
        ("requests", "calls answered", _number),
        ("failed", "calls failed", _number),
        ("seconds", "time for all calls", _seconds),
        ("calls_per_s", "calls per second", _number),
        ("prefix_hit_tokens", "prefix-hit tokens", _number),
        ("recomputed_tokens", "tokens computed", _number),
        ("preemptions", "preemptions", _number),
    ):
        yield label, written(on[name]), written(off[name])
    for share in ("p50", "p90", "p99"):
        first_on, first_off = (one["ttft_s"] and one["ttft_s"][share] for one in (on, off))
        yield f"first token {share}", _seconds(first_on), _seconds(first_off)


def conclusion(comparison: Comparison) -> Iterator[str]:
    """The result, in sentences."""
    document = summary_document(comparison)
    yield _verdict_text(comparison)
    if _longer_wait(document):
        yield (
            "The slowest calls waited longer for their first token with the policy on: calls "
            "whose prefix is still held start first, until another call has waited too long."
        )
    differing = document["token_differences"]
    yield (
        f"Tokens: {document['compared']:,} answers compared, {differing:,} differ"
        + ("; the moves changed no token." if differing == 0 else ": THIS IS A BUG.")
    )


def _verdict_text(comparison: Comparison) -> str:
    sizing, saved = comparison.sizing, _saved(comparison)
    hits = sum(call.prefix_hit_tokens or 0 for call in comparison.on.result.calls)
    hits_off = sum(call.prefix_hit_tokens or 0 for call in comparison.off.result.calls)
    found = f"{hits - hits_off:+,} prefix-hit tokens"
    match verdict_of(comparison):
        case Verdict.GAIN:
            return f"The policy answered the same calls in {saved:.0%} less time ({found})."
        case Verdict.LOSS:
            return f"The policy needed {-saved:.0%} more time for the same calls ({found})."
        case Verdict.NO_DIFFERENCE:
            why = ""
            if sizing.load < 1:
                why = f" The live set is {sizing.load:.1f} times the reach: every prefix fits."
            return f"No difference: the times are {abs(saved):.0%} apart ({found}).{why}"
        case Verdict.TOO_FEW_CALLS:
            return (
                f"Too few calls to compare: {sizing.calls} from {sizing.concurrency} sessions, at "
                f"{sizing.tokens_per_s:,.0f} prompt tokens per second. Use a longer run (--for) or "
                "the smaller model (--model small)."
            )


def _longer_wait(document: dict[str, Any]) -> bool:
    on, off = document["ttft_s"], document["policy_off"]["ttft_s"]
    return bool(on and off and on["p99"] > 1.2 * off["p99"])


def _setting(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _number(value: int | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
    return f"{value:,}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{_number(float(value))} s"


def sentences(decisions: Sequence[DecisionView]) -> list[str]:
    """Live lines for decisions that act, oldest first."""
    return [
        f"{one.lever:<10} {one.code:<18} {one.sentence}"
        for one in sorted(decisions, key=lambda one: (one.tick, one.lever))
        if one.acts
    ]
