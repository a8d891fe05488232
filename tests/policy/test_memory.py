"""Windows: extremes, fullness, gaps and bounded memory."""

from __future__ import annotations

import random

import pytest

from hisparsed.policy.memory import Ewma, Window


def filled(values: list[float], span_s: float, step_s: float = 1.0) -> Window:
    window = Window()
    for index, value in enumerate(values):
        window = window.push(index * step_s, value, span_s, 5.0)
    return window


def test_extremes_cover_at_least_the_span_and_at_most_a_bucket_more() -> None:
    rng = random.Random(7)
    span_s, values = 60.0, []
    window = Window()
    for second in range(400):
        values.append(rng.random())
        window = window.push(float(second), values[-1], span_s, 5.0)
        shortest, longest = values[-61:], values[-64:]
        assert min(longest) <= window.low <= min(shortest)
        assert max(shortest) <= window.high <= max(longest)


def test_full_only_after_the_whole_span() -> None:
    assert not filled([1.0] * 10, 10.0).full(10.0)
    assert filled([1.0] * 11, 10.0).full(10.0)


def test_an_empty_window_is_never_full() -> None:
    assert not Window().full(0.0)
    assert (Window().low, Window().high, Window().observed_s) == (0.0, 0.0, 0.0)


def test_a_gap_starts_anew() -> None:
    window = filled([9.0] * 20, 10.0).push(25.1, 1.0, 10.0, 5.0)
    assert (window.low, window.high) == (1.0, 1.0)
    assert not window.full(10.0)


def test_no_gap_at_exactly_the_limit() -> None:
    window = filled([9.0] * 20, 10.0).push(24.0, 1.0, 10.0, 5.0)
    assert window.high == 9.0
    assert window.full(10.0)


def test_memory_is_bounded() -> None:
    window = filled([float(i) for i in range(5_000)], 3_600.0)
    assert len(window.buckets) <= 50
    assert window.high - window.low >= 3_600


def test_a_rate_needs_two_moments() -> None:
    assert filled([5.0], 10.0).rate_per_s is None
    assert filled([0.0, 3.0, 6.0, 9.0], 10.0).rate_per_s == 3.0
    assert Window().rate_per_s is None


def test_a_smoothed_value_closes_in_with_its_time_constant() -> None:
    smooth = Ewma().push(0.0, 10.0, 60.0, 5.0)
    assert smooth.value == 10.0
    for second in range(1, 61):
        smooth = smooth.push(float(second), 20.0, 60.0, 5.0)
    assert smooth.value == pytest.approx(20 - 10 / 2.718281828, rel=1e-6)


def test_a_smoothed_value_starts_anew_after_a_gap() -> None:
    assert Ewma(10.0, 0.0).push(5.1, 2.0, 60.0, 5.0).value == 2.0
    assert Ewma().value is None
