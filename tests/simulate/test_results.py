"""Only events after the warm-up count in a run."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hisparsed.engine.simulated.cost import VirtualClock
from hisparsed.engine.simulated.work import WorkTotals
from hisparsed.policy.forecasts import Figure
from hisparsed.policy.signals import Lever
from hisparsed.simulate.report import predictions, results_text
from hisparsed.simulate.results import CallTimes, Limits, Measures, PolicyResult, Sample, summarise
from hisparsed.simulate.run import Driver


class BusyNode:
    """Takes steps of one second forever; each preempts one request."""

    hisparse = False

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.tally = WorkTotals()
        self.busy = True

    def step(self) -> tuple[list[Any], bool]:
        self.clock.advance(1.0)
        self.tally.steps += 1
        self.tally.preemptions += 1
        return [], True

    def counts(self) -> tuple[int, int]:
        return 1, 0

    def gpu_free_blocks(self) -> int:
        return 1

    def copied_bytes(self) -> float:
        return 0.0

    def serving(self) -> Any:
        return SimpleNamespace(prefix_hit_tokens=0, prompt_tokens=0, generated_tokens=0)


def test_steps_and_preemptions_of_the_warm_up_do_not_count() -> None:
    control = SimpleNamespace(
        admission=None, tick_s=1.0, start=lambda: None, tick=lambda: None, journal_lost=0
    )
    players = SimpleNamespace(first=list)
    driver = Driver(cast(Any, BusyNode()), cast(Any, control), cast(Any, players), Measures(5, 20))
    found = driver.run()
    assert (found.steps, found.preemptions) == (15, 15)


def test_refusals_and_moves_of_the_warm_up_do_not_count() -> None:
    measures = Measures(10.0, 20.0)
    for at_s in (9.9, 10.0, 15.0):
        measures.count_refusal(at_s)
        measures.count_moves(at_s, 2)
    assert (measures.refused, measures.moves) == (2, 4)


def test_predictions_of_a_policy_are_shown_over_its_runs() -> None:
    measures = Measures(10.0, 110.0, samples=[sample(11.0), sample(109.0)])
    measures.judged = [
        (Lever.SPLIT, {Figure.REACH: 0.2}),
        (Lever.MULTIPLIER, {Figure.FREED: 0.0, Figure.LOADED: 1.2}),
        (Lever.SPLIT, {Figure.REACH: 0.1}),
    ]
    limits = Limits()
    one = summarise("p", 1, 0, measures, scale=Fraction(1), copy_bandwidth=1.0, limits=limits)
    assert PolicyResult.model_validate_json(one.model_dump_json()) == one
    assert predictions([one, one.model_copy(update={"seed": 1})]) == [
        "p: split, reach tokens: 4 moves, off by 20% (p50) and 20% (p90)",
        "p: multiplier, loaded bytes per s: 2 moves, off by 120% (p50) and 120% (p90)",
        "p: multiplier, freed gpu blocks: 2 moves, off by 0% (p50) and 0% (p90)",
    ]
    assert "Expected of moves against what came:\n  p: split" in results_text([one])
    assert "Expected" not in results_text([one.model_copy(update={"predictions": ()})])


def result(samples: Sequence[Sample], *calls: CallTimes) -> PolicyResult:
    measures = Measures(10.0, 110.0, calls=list(calls), samples=list(samples))
    return summarise("p", 1, 0, measures, scale=Fraction(1), copy_bandwidth=100.0, limits=Limits())


def sample(at_s: float) -> Sample:
    return Sample(at_s, 1, 0, 5, 0, 0, int(10 * at_s), at_s * 50.0, at_s * 0.25)


def test_calls_that_failed_in_the_warm_up_do_not_count() -> None:
    early, late = (CallTimes("a", 0, 9, 9, 1.0, 2.0, end, failed=True) for end in (3.0, 50.0))
    assert result([sample(11.0), sample(109.0)], early, late).failed == 1


def test_rates_are_of_the_time_between_the_samples_that_they_are_from() -> None:
    found = result([sample(9.0), sample(12.0), sample(62.0)])
    assert found.throughput == pytest.approx(10)
    assert found.link_use == pytest.approx(0.5)
    assert found.core_use == pytest.approx(0.25)


def test_one_sample_shows_no_rate() -> None:
    found = result([sample(60.0)])
    assert (found.throughput, found.link_use) == (0, 0)
