"""The expected gain of each lever's move, and whether it was reached.

The split: reach for moves of the equal-reach law, tokens of prefix per minute for marginal value.
The multiplier: GPU blocks that hot buffers give back, and bytes of rows per second. Admission:
tokens of prefix per minute that are still served. A move that falls short by more than half makes
the lever's next ones wait longer, and so does a lever whose predictions are usually that wrong.
Pure; decides no move.
"""

from __future__ import annotations

from dataclasses import replace

from hisparsed.policy.bounds import hot_unit, shared_blocks
from hisparsed.policy.decisions import LeverDecision
from hisparsed.policy.forecasts import OFF_BY, Figure, Figures, Outcome, Setting, quantile
from hisparsed.policy.memory import (
    QUEUE_SPAN_S,
    Expectation,
    JudgedError,
    Memory,
    Window,
)
from hisparsed.policy.reach import live_load, reach_at, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Snapshot
from hisparsed.policy.units import format_bytes, format_fraction

_JUDGE_ANYWAY = 4.0
"""Windows after which a move that has not settled is judged as it is."""
_EFFECTIVE_MEMORY_S = 3600.0
_LEAST_FITTING = 0.01
"""Where an empty pool makes the load infinite."""
_KEPT_ERRORS = 16
_FEWEST_ERRORS = 3
"""Fewer verdicts do not make a lever doubtful."""


# --- stated by the laws -----------------------------------------------------------------


def expect_reach(policy: Policy, snapshot: Snapshot, to_blocks: int) -> Figures:
    """The expectation of the equal-reach law; zero or less where it only restores its margin."""
    now = snapshot.offload.target_blocks
    gained = _min_reach(policy, snapshot, to_blocks) - _min_reach(policy, snapshot, now)
    return {Figure.REACH: float(gained)}


def expect_saved(saved_per_min: float) -> Figures:
    """The expectation of marginal value."""
    return {Figure.SAVED: saved_per_min}


def expect_leases(snapshot: Snapshot, wanted_blocks: int, bytes_per_s: float | None) -> Figures:
    """Blocks that hot buffers of another size give back and bytes that they read, for the requests
    that have one now.

    ``bytes_per_s`` is ``None`` where the node predicts none.
    """
    lease = round(snapshot.hot.multiplier / hot_unit(snapshot.geometry))
    requests = snapshot.hot.leased_requests
    found = {}
    if requests and lease != wanted_blocks:
        freed = (lease - wanted_blocks) * snapshot.geometry.hot_groups * requests
        found[Figure.FREED] = float(freed)
    if bytes_per_s:
        found[Figure.LOADED] = bytes_per_s
    return found


def expect_served(snapshot: Snapshot, memory: Memory) -> Figures:
    """The expectation of an order of calls: prefixes are found as before, as far as they fit."""
    ratio, asked = _hit_ratio(memory), _query_per_min(memory)
    if not ratio or not asked:
        return {}
    return {Figure.SERVED: ratio * asked * _fitting(snapshot)}


def _fitting(snapshot: Snapshot) -> float:
    """Share of the idle live set that the smaller reach holds; a little of one that is endless."""
    load = live_load(snapshot, reach_now(snapshot))
    return 1.0 if load <= 1 else max(_LEAST_FITTING, 1 / load)


# --- remembered, and judged -------------------------------------------------------------


def begun(snapshot: Snapshot, memory: Memory, decision: LeverDecision) -> Memory:
    """Memory with the expectation of ``decision``'s move.

    Steps of the split's one way that follow each other before they are judged are judged as one;
    one that gains nothing is not judged.
    """
    lever, asked = decision.lever, memory.signals.shrink_references_total.rate_per_s
    new = Expectation(
        snapshot.at_s,
        decision.current,
        decision.wanted,
        dict(decision.expected),
        hit_ratio=_hit_ratio(memory),
        query_per_min=_query_per_min(memory),
        asked_per_s=asked,
        leased_requests=snapshot.hot.leased_requests,
        fitting=_fitting(snapshot),
    )
    judged = bool(new.expected)
    if lever is Lever.SPLIT:
        new = _merged(memory.expectations.get(lever), new)
        judged = any(value > 0 for value in new.expected.values())
    kept = {one: known for one, known in memory.expectations.items() if one is not lever}
    if judged:
        kept[lever] = new
    return replace(memory, expectations=kept)


def _merged(old: Expectation | None, new: Expectation) -> Expectation:
    if old is None or old.outcome is not None:
        return new
    if old.expected.keys() != new.expected.keys() or _grows(old) != _grows(new):
        return new
    return replace(
        new,
        current=old.current,
        expected={name: value + new.expected[name] for name, value in old.expected.items()},
        hit_ratio=old.hit_ratio,
    )


def _grows(one: Expectation) -> bool:
    return float(one.wanted) > float(one.current)


def judge_moves(policy: Policy, snapshot: Snapshot, memory: Memory) -> Memory:
    """Memory with the verdict on each move that has settled, once its window has passed."""
    for lever, waiting in memory.expectations.items():
        window_s, since_s = _window_s(policy, lever), snapshot.at_s - waiting.at_s
        settled = lever is not Lever.SPLIT or not (
            snapshot.pending_blocks or snapshot.draining_blocks
        )
        due = since_s >= window_s and (settled or since_s >= _JUDGE_ANYWAY * window_s)
        if waiting.outcome is None and due:
            memory = _judged(policy, snapshot, memory, lever, waiting)
    return memory


def _window_s(policy: Policy, lever: Lever) -> float:
    """Time from a move to the verdict on it."""
    if lever is Lever.MULTIPLIER:
        return policy.hot.window_shrink
    # Calls of agents take minutes, so an order shows over minutes only.
    return QUEUE_SPAN_S if lever is Lever.ADMISSION else policy.rebalance.window


def _judged(
    policy: Policy, snapshot: Snapshot, memory: Memory, lever: Lever, moved: Expectation
) -> Memory:
    came = {name: _measured(policy, snapshot, memory, name, moved) for name in moved.expected}
    known = {name: value for name, value in came.items() if value is not None}
    others = {one: kept for one, kept in memory.expectations.items() if one is not lever}
    if not known:
        return replace(memory, expectations=others)
    at_s = snapshot.at_s
    measured_s = policy.hot.window_shrink if lever is Lever.MULTIPLIER else policy.rebalance.window
    expected = {name: moved.expected[name] for name in known}
    outcome = Outcome(at_s - moved.at_s, moved.current, moved.wanted, measured_s, expected, known)
    error = JudgedError(at_s, max(outcome.errors.values()))
    errors = (*memory.errors.get(lever, ()), error)[-_KEPT_ERRORS:]
    memory = replace(
        memory,
        expectations={**others, lever: replace(moved, outcome=outcome, judged_at_s=at_s)},
        errors={**memory.errors, lever: errors},
    )
    if lever is Lever.SPLIT:
        effective = memory.effective.push(
            at_s, not outcome.short, _EFFECTIVE_MEMORY_S, float("inf")
        )
        memory = replace(memory, effective=effective)
    return _disappointed(memory, lever, moved, at_s) if outcome.short else memory


def _disappointed(memory: Memory, lever: Lever, moved: Expectation, at_s: float) -> Memory:
    if lever is Lever.SPLIT:
        return replace(memory, split=memory.split.disappointed(at_s))
    if lever is Lever.ADMISSION:
        return replace(memory, admission=memory.admission.disappointed(at_s))
    if moved.current == moved.wanted:
        return replace(memory, sharing=memory.sharing.disappointed(at_s))
    return replace(memory, multiplier=memory.multiplier.disappointed(at_s))


def _measured(
    policy: Policy, snapshot: Snapshot, memory: Memory, figure: Figure, moved: Expectation
) -> float | None:
    """At the load of the move where load changes the figure; ``None`` where it is not known."""
    signals, ratio = memory.signals, _hit_ratio(memory)
    if figure is Figure.REACH:
        # Compared with the old split under the present load: the move does not change the load.
        there = reach_now(snapshot).min_tokens
        return float(there - _min_reach(policy, snapshot, int(moved.current)))
    if figure is Figure.SAVED:
        asked = _query_per_min(memory)
        if ratio is None or moved.hit_ratio is None or asked is None:
            return None
        return (ratio - moved.hit_ratio) * asked
    if figure is Figure.SERVED:
        if ratio is None or moved.query_per_min is None:
            return None
        return ratio * moved.query_per_min * moved.fitting / _fitting(snapshot)
    if figure is Figure.LOADED:
        asked_now = signals.shrink_references_total.rise
        if not asked_now or moved.asked_per_s is None:
            return None
        return signals.shrink_h2d_bytes_total.rise / asked_now * moved.asked_per_s
    requests = snapshot.hot.leased_requests
    if not requests:
        return None
    before = round(float(moved.current) / hot_unit(snapshot.geometry))
    given = before * snapshot.geometry.hot_groups - snapshot.hot.leased_blocks / requests
    return given * moved.leased_requests


def typical_error(memory: Memory, lever: Lever) -> float | None:
    """The median of the lever's last verdicts; ``None`` where they are too few."""
    errors = sorted(one.error for one in memory.errors.get(lever, ()))
    return quantile(errors, 0.5) if len(errors) >= _FEWEST_ERRORS else None


def doubt(policy: Policy, memory: Memory, lever: Lever) -> float:
    """How many times longer the lever waits, because its predictions are usually wrong."""
    error = typical_error(memory, lever)
    return policy.rebalance.back_off.factor if error is not None and error > OFF_BY else 1.0


# --- said -------------------------------------------------------------------------------


def words(expected: Figures) -> str:
    """The end of a sentence; empty where there is nothing to expect."""
    if expected.get(Figure.REACH, 0.0) > 0:
        return f"; that should add {expected[Figure.REACH]:.0f} tokens of reach"
    if expected.get(Figure.SAVED, 0.0) > 0:
        return f"; that should save {expected[Figure.SAVED]:.0f} tokens of prefix per minute"
    return ""


def outcome_now(snapshot: Snapshot, memory: Memory, lever: Lever) -> Outcome | None:
    """Of the lever's last move, in the tick in which it is judged."""
    judged = memory.expectations.get(lever)
    if judged is None or judged.judged_at_s != snapshot.at_s:
        return None
    return judged.outcome


def verdict(snapshot: Snapshot, memory: Memory, lever: Lever) -> str:
    """The end of a sentence in the tick in which a move is judged; empty otherwise."""
    outcome = outcome_now(snapshot, memory, lever)
    if outcome is None:
        return ""
    expected = " and ".join(
        f"{_VERBS[name]} {_value(name, value)} {_NOUNS[name]}".rstrip()
        for name, value in outcome.expected.items()
    )
    came = " and ".join(_value(name, value) for name, value in outcome.came.items())
    said = (
        f"; the move from {_setting(outcome.current)} to {_setting(outcome.wanted)} was expected "
        f"to {expected} and brought {came}"
    )
    error = typical_error(memory, lever)
    if error is None or error <= OFF_BY:
        return said
    return (
        f"{said}; of the last {len(memory.errors[lever])} predictions half are off by "
        f"{format_fraction(round(error, 2))} or more, so {lever} waits longer"
    )


def _setting(value: Setting) -> str:
    return value if isinstance(value, str) else f"{value:g}"


_VERBS = {
    Figure.REACH: "add",
    Figure.SAVED: "add",
    Figure.SERVED: "serve",
    Figure.LOADED: "read",
    Figure.FREED: "free",
}
_NOUNS = {
    Figure.REACH: "tokens of reach",
    Figure.SAVED: "tokens of prefix per minute",
    Figure.SERVED: "tokens of prefix per minute",
    Figure.LOADED: "of rows",
    Figure.FREED: "GPU blocks",
}


def _value(name: Figure, value: float) -> str:
    return f"{format_bytes(round(value))}/s" if name is Figure.LOADED else f"{value:.0f}"


def figures(memory: Memory, lever: Lever) -> dict[str, float]:
    """The last move's ``expected_...`` and ``realised_...``, and how the lever's predictions
    did."""
    found: dict[str, float] = {}
    last = memory.expectations.get(lever)
    if last is not None:
        found |= {f"expected_{name}": value for name, value in last.expected.items()}
        if last.outcome is not None:
            found |= {f"realised_{name}": value for name, value in last.outcome.came.items()}
    errors = sorted(one.error for one in memory.errors.get(lever, ()))
    if errors:
        found["judged_moves"] = float(len(errors))
        found["error_p50_ratio"] = quantile(errors, 0.5)
        found["error_p90_ratio"] = quantile(errors, 0.9)
    if lever is Lever.SPLIT and memory.effective.value is not None:
        found["effective_moves_ratio"] = memory.effective.value
    return found


def _min_reach(policy: Policy, snapshot: Snapshot, offload_blocks: int) -> int:
    geometry = snapshot.geometry
    return reach_at(
        geometry,
        offload_blocks,
        snapshot.hisparse.in_use_blocks,
        snapshot.offload.in_use_chunks,
        shared_blocks(policy, geometry),
    ).min_tokens


def _hit_ratio(memory: Memory) -> float | None:
    asked: Window = memory.signals.split_query_total
    return memory.signals.split_hit_total.rise / asked.rise if asked.rise else None


def _query_per_min(memory: Memory) -> float | None:
    rate = memory.signals.split_query_total.rate_per_s
    return None if rate is None else rate * 60
