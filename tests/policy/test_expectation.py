"""The expectation of each lever's move, the verdict, and the effect of wrong predictions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy import expectation
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Decision, LeverDecision, Reason
from hisparsed.policy.forecasts import (
    MOST_ERROR,
    ErrorShare,
    Figure,
    Outcome,
    error_of,
    error_shares,
    falls_short,
)
from hisparsed.policy.memory import JudgedError, Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, Lever, MissPoint, Snapshot

ROW = 6_400
LEASE = 64
"""Hot blocks of one group at 2x; the kit's node has 8 groups."""
CURVE = (MissPoint(1.0, 0.2), MissPoint(1.5, 0.15), MissPoint(2.0, 0.1))


def run(
    snapshots: list[Snapshot], made: Policy | None = None, memory: Memory | None = None
) -> tuple[list[Decision], Memory]:
    memory, found = memory or Memory(), []
    for one in snapshots:
        decision, memory = decide(made or Policy(version=1), one, memory)
        found.append(decision)
    return found, memory


def outcomes(decisions: list[Decision], lever: Lever) -> list[Outcome]:
    judged = [one.of(lever).outcome for one in decisions]
    return [one for one in judged if one is not None]


def moves(decisions: list[Decision], lever: Lever) -> list[LeverDecision]:
    return [one.of(lever) for one in decisions if one.of(lever).acts]


# --- the multiplier ---------------------------------------------------------------------


def pressed(kit: Any, second: int, *, lease: int, misses: float, held: int = 4) -> Snapshot:
    """Requests wait for GPU blocks; each asks for 1,000 rows per second, ``misses`` of them missed
    so far on average."""
    asked = 4_000 * second
    loads = round(asked * misses)
    return kit.change(
        kit.idle_snapshot(),
        at_s=1_000.0 + second,
        tick=second,
        gpu__free_blocks=100,
        requests__running=4,
        requests__none=4,
        requests__waiting=2,
        tokens__prompt_total=100 * second,
        hot__multiplier=lease / 32,
        hot__references_total=asked,
        hot__loads_total=loads,
        hot__h2d_bytes_total=loads * ROW,
        hot__predicted=CURVE,
        hot__leased_requests=held,
        hot__leased_blocks=held * lease * 8,
    )


def shrunk(kit: Any, misses_after: float, held: int = 4) -> tuple[list[Decision], Memory]:
    """From 2x to 1.5x after ten seconds; then rows are missed at another rate."""
    snapshots = [pressed(kit, second, lease=LEASE, misses=0.1) for second in range(11)]
    before = snapshots[-1].hot
    for second in range(1, 11):
        after = pressed(kit, 10 + second, lease=48, misses=0.1, held=held)
        loads = before.loads_total + round(4_000 * second * misses_after)
        snapshots.append(
            kit.change(after, hot__loads_total=loads, hot__h2d_bytes_total=loads * ROW)
        )
    return run(snapshots)


def test_a_shrink_expects_blocks_and_bytes_and_is_judged_after_its_window(kit: Any) -> None:
    decisions, memory = shrunk(kit, misses_after=0.15)
    (move,) = moves(decisions, Lever.MULTIPLIER)[:1]
    assert move.reason is Reason.GPU_POOL_PRESSURE
    assert move.expected == {
        Figure.FREED: 4 * 16 * 8,
        Figure.LOADED: pytest.approx(0.15 * 4_000 * ROW),
    }
    (judged,) = outcomes(decisions, Lever.MULTIPLIER)
    assert (judged.current, judged.wanted, judged.window_s) == (2.0, 1.5, 10.0)
    assert judged.came[Figure.FREED] == 4 * 16 * 8
    assert judged.came[Figure.LOADED] == pytest.approx(0.15 * 4_000 * ROW, rel=0.01)
    assert max(judged.errors.values()) < 0.01
    assert not judged.short
    assert memory.multiplier.undone == 0
    said = decisions[-1].of(Lever.MULTIPLIER).sentence
    assert "the move from 2 to 1.5 was expected to free 512 GPU blocks and read" in said


def test_what_came_is_put_at_the_load_of_the_move(kit: Any) -> None:
    """Half of the requests have ended: they give back half, which is no fault of the move."""
    decisions, _ = shrunk(kit, misses_after=0.15, held=2)
    (judged,) = outcomes(decisions, Lever.MULTIPLIER)
    assert judged.errors[Figure.FREED] == 0


def test_more_misses_than_expected_lengthen_the_next_waits(kit: Any) -> None:
    decisions, memory = shrunk(kit, misses_after=0.4)
    (judged,) = outcomes(decisions, Lever.MULTIPLIER)
    assert judged.errors[Figure.LOADED] == pytest.approx(0.4 / 0.15 - 1, rel=0.02)
    assert judged.short
    assert memory.multiplier.undone == 1


def test_fewer_misses_than_expected_are_an_error_but_no_fault(kit: Any) -> None:
    decisions, memory = shrunk(kit, misses_after=0.05)
    (judged,) = outcomes(decisions, Lever.MULTIPLIER)
    assert judged.errors[Figure.LOADED] > 0.5
    assert not judged.short
    assert memory.multiplier.undone == 0


def test_a_multiplier_whose_predictions_are_usually_wrong_waits_longer_and_says_so(
    kit: Any,
) -> None:
    wrong = tuple(JudgedError(900.0 + turn, 0.8) for turn in range(3))
    memory = Memory(errors={Lever.MULTIPLIER: wrong})
    first = pressed(kit, 0, lease=LEASE, misses=0.1)
    _, memory = run([first], memory=memory)
    memory = dataclasses.replace(
        memory, multiplier=dataclasses.replace(memory.multiplier, last_at_s=1_000.0)
    )
    ticks = [pressed(kit, second, lease=LEASE, misses=0.1) for second in range(1, 21)]
    decisions, _ = run(ticks, memory=memory)
    assert [one.tick for one in decisions if one.of(Lever.MULTIPLIER).acts] == [20]
    known, _ = run(ticks, memory=dataclasses.replace(memory, errors={}))
    assert next(one.tick for one in known if one.of(Lever.MULTIPLIER).acts) == 10
    assert decisions[0].of(Lever.MULTIPLIER).figures["error_p50_ratio"] == 0.8


# --- admission --------------------------------------------------------------------------


def queued(kit: Any, second: int, ratio: float, order: AdmissionOrder, load: float) -> Snapshot:
    """Calls ask for 1,000 prompt tokens per second; ``ratio`` of all so far was found."""
    reach = (10_000 - 650) * 64
    return kit.change(
        kit.idle_snapshot(lent=650),
        at_s=1_000.0 + second,
        tick=second,
        requests__running=4,
        tokens__prompt_total=1_000 * second,
        prefix__query_tokens_total=1_000 * second,
        prefix__hit_tokens_total=round(1_000 * second * ratio),
        sessions__live_set_tokens=round(load * reach),
        sessions__live_sessions=5,
        admission__order=order,
    )


def engaged(kit: Any, ratio_after: float, load_after: float = 2.0) -> tuple[list[Decision], Memory]:
    """After a minute the live set is twice the reach; then the hit ratio is another."""
    before = [queued(kit, s, 0.9, AdmissionOrder.ARRIVAL, 0.5) for s in range(61)]
    before.append(queued(kit, 61, 0.9, AdmissionOrder.ARRIVAL, 2.0))
    after = []
    for second in range(62, 363):
        one = queued(kit, second, 0.9, AdmissionOrder.HELD_PREFIX_FIRST, load_after)
        hits = round(61_000 * 0.9 + 1_000 * (second - 61) * ratio_after)
        after.append(kit.change(one, prefix__hit_tokens_total=hits))
    return run([*before, *after])


def test_an_order_expects_that_what_fits_is_still_found(kit: Any) -> None:
    decisions, memory = engaged(kit, ratio_after=0.6)
    (move,) = moves(decisions, Lever.ADMISSION)
    assert move.reason is Reason.COVERAGE_LOW
    assert move.expected == {Figure.SERVED: pytest.approx(0.9 * 60_000 / 2, rel=0.02)}
    (judged,) = outcomes(decisions, Lever.ADMISSION)
    assert judged.came == {Figure.SERVED: pytest.approx(0.6 * 60_000, rel=0.02)}
    assert not judged.short
    assert memory.admission.undone == 0


def test_a_load_that_grows_after_the_move_is_no_fault_of_the_order(kit: Any) -> None:
    decisions, memory = engaged(kit, ratio_after=0.15, load_after=6.0)
    (judged,) = outcomes(decisions, Lever.ADMISSION)
    assert judged.errors[Figure.SERVED] == pytest.approx(0, abs=0.02)
    assert memory.admission.undone == 0


def test_an_order_that_serves_less_waits_before_it_changes_again(kit: Any) -> None:
    decisions, memory = engaged(kit, ratio_after=0.1)
    assert memory.admission.undone == 1
    at_s = decisions[-1].at_s
    last = dataclasses.replace(memory.admission, last_at_s=at_s)
    again = queued(kit, 363, 0.5, AdmissionOrder.ARRIVAL, 2.0)
    memory = dataclasses.replace(memory, admission=last)
    (held,), _ = run([again], memory=memory)
    admission = held.of(Lever.ADMISSION)
    assert admission.reason is Reason.BACKED_OFF
    assert "served less than expected" in admission.sentence
    later = dataclasses.replace(last, last_at_s=at_s - 60)
    (acts,), _ = run([again], memory=dataclasses.replace(memory, admission=later))
    assert acts.of(Lever.ADMISSION).reason is Reason.COVERAGE_LOW


def test_an_order_expects_nothing_before_anything_was_asked(kit: Any) -> None:
    (decision,), memory = run([queued(kit, 0, 0.0, AdmissionOrder.ARRIVAL, 2.0)])
    assert decision.of(Lever.ADMISSION).acts
    assert not decision.of(Lever.ADMISSION).expected
    assert not memory.expectations


# --- arithmetic -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "came", "error"),
    [(100, 100, 0), (100, 50, 0.5), (100, 250, 1.5), (-100, -50, 0.5), (0, 0, 0), (0, 1, 10)],
)
def test_an_error_is_a_share_of_what_was_expected(
    expected: float, came: float, error: float
) -> None:
    assert error_of(expected, came) == error
    assert error_of(1e-9, 1e9) == MOST_ERROR


@pytest.mark.parametrize(
    ("figure", "came", "short"),
    [
        (Figure.REACH, 50, False),
        (Figure.REACH, 49, True),
        (Figure.REACH, 500, False),
        (Figure.LOADED, 150, False),
        (Figure.LOADED, 151, True),
        (Figure.LOADED, 0, False),
    ],
)
def test_only_worse_falls_short(figure: Figure, came: float, short: bool) -> None:
    assert falls_short(figure, 100, came) is short


def test_growth_that_takes_more_blocks_than_expected_falls_short() -> None:
    assert falls_short(Figure.FREED, -100, -151)
    assert not falls_short(Figure.FREED, -100, -40)


def test_errors_are_listed_by_lever_and_figure() -> None:
    verdicts = [
        (Lever.MULTIPLIER, {Figure.FREED: 0.1, Figure.LOADED: 0.9}),
        (Lever.SPLIT, {Figure.REACH: 0.4}),
        (Lever.MULTIPLIER, {Figure.FREED: 0.05}),
    ]
    assert error_shares(verdicts) == [
        ErrorShare(Lever.SPLIT, Figure.REACH, (0.4,)),
        ErrorShare(Lever.MULTIPLIER, Figure.LOADED, (0.9,)),
        ErrorShare(Lever.MULTIPLIER, Figure.FREED, (0.05, 0.1)),
    ]
    assert (
        error_shares(verdicts)[2].text
        == "multiplier, freed gpu blocks: 2 moves, off by 10% (p50) and 10% (p90)"
    )


def test_two_verdicts_do_not_make_a_lever_doubtful() -> None:
    made = Policy(version=1)
    for count, factor in ((2, 1.0), (3, made.rebalance.back_off.factor)):
        errors = tuple(JudgedError(0.0, 0.9) for _ in range(count))
        memory = Memory(errors={Lever.SPLIT: errors})
        assert expectation.doubt(made, memory, Lever.SPLIT) == factor
        assert expectation.doubt(made, memory, Lever.MULTIPLIER) == 1.0
