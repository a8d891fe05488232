"""Series out of samples: rates and ratios from differences, gaps where nothing is known."""

from __future__ import annotations

import pytest
from recorded_node import recorded

from hisparsed.policy.derived import HISTORY
from hisparsed.tui.history import SPAN_S, ChartHistory, known, values_of

BEGIN = 1_700_000_000.0


def sample(**values: float) -> tuple[float | None, ...]:
    """Values by their paths, without the part of the document that they are in."""
    return tuple(values.get(path.partition(".")[2].replace(".", "_")) for path in HISTORY)


def tokens(total: float) -> tuple[float | None, ...]:
    return sample(tokens_generated_total=total)


def test_a_rate_is_a_difference_over_time() -> None:
    history = ChartHistory()
    for second in range(11):
        history.add(BEGIN + second, tokens(second * 50))
    assert history.buckets("tokens", 10, 2, end_s=BEGIN + 10) == [50, 50]


def test_a_counter_that_went_back_makes_a_gap_and_no_spike() -> None:
    history = ChartHistory()
    for second, total in enumerate((1_000, 1_100, 0, 100, 200)):
        history.add(BEGIN + second, tokens(total))
    assert history.buckets("tokens", 4, 4, end_s=BEGIN + 4) == [100, None, 100, 100]


def test_a_ratio_leaves_parts_without_events_out() -> None:
    history = ChartHistory()
    for second, (hits, loads) in enumerate(((0, 0), (90, 10), (90, 10), (150, 50))):
        history.add(BEGIN + second, sample(hot_hits_total=hits, hot_loads_total=loads))
    found = history.buckets("miss", 3, 3, end_s=BEGIN + 3)
    assert found == [0.1, None, 0.4]


def test_a_gauge_is_the_mean_of_its_samples() -> None:
    history = ChartHistory()
    for second, running in enumerate((2, 4, 6, 8)):
        history.add(BEGIN + second, sample(requests_running=running))
    assert history.buckets("running", 4, 2, end_s=BEGIN + 3) == [3, 7]
    assert history.latest("running", 1) == 8


def test_nothing_is_known_before_the_first_sample() -> None:
    history = ChartHistory()
    assert history.latest("tokens", 60) is None
    history.add(BEGIN, tokens(5))
    assert known(history.buckets("tokens", 100, 10, end_s=BEGIN)) == []


def test_coarse_samples_fill_the_parts_between_them() -> None:
    history = ChartHistory()
    for index in range(5):
        history.add(BEGIN + 5 * index, tokens(index * 100))
    assert history.buckets("tokens", 10, 10, end_s=BEGIN + 20) == [20] * 10


def test_memory_is_bounded_and_reaches_back_two_hours() -> None:
    history = ChartHistory()
    for second in range(4 * 3_600):
        history.add(BEGIN + second, tokens(second))
    assert len(history) < 2_000
    found = history.buckets("tokens", SPAN_S, 100, end_s=BEGIN + 4 * 3_600 - 1)
    assert found == [pytest.approx(1.0)] * 100


def test_the_past_comes_before_what_is_known_already() -> None:
    document, history = recorded("history"), ChartHistory()
    newest = document["rows"][-1][0]
    history.add(newest + 1, values_of(recorded("status")))
    history.load(document)
    assert history.newest_s == newest + 1
    assert len(history) == len(document["rows"]) + 1
    history.load(document)
    assert len(history) == len(document["rows"]) + 1


@pytest.mark.parametrize("document", [{}, {"columns": 1, "rows": 2}, {"columns": [], "rows": [1]}])
def test_an_odd_past_is_left_out(document: dict[str, object]) -> None:
    history = ChartHistory()
    history.load(document)
    assert len(history) == 0


def test_what_came_before_a_time_without_samples_is_not_of_now() -> None:
    history = ChartHistory()
    for second in range(11):
        history.add(BEGIN + second, tokens(second * 50))
    assert history.latest("tokens", 10) == 50
    history.pass_to(BEGIN + 30)
    assert history.latest("tokens", 10) is None
    history.add(BEGIN + 31, tokens(600))
    assert history.newest_s == BEGIN + 31


def test_rows_that_a_node_does_not_count_are_gaps_not_zeros() -> None:
    uncounted = recorded("status")
    uncounted["observed"]["hot"]["counted"] = False
    known_rows, unknown = (
        dict(zip(HISTORY, values_of(one), strict=True)) for one in (recorded("status"), uncounted)
    )
    assert known_rows["observed.hot.loads_total"] == 15296
    assert unknown["observed.hot.loads_total"] is None
    assert unknown["observed.hot.multiplier"] == 4.0
