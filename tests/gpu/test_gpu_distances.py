"""Rounds are compared by distance: near ties pass, and what is wrong does not."""

from __future__ import annotations

import pytest
from gpu_distances import CEILING, FLOOR, Distance, distance, tolerance_of

TOLERANCE = 0.05


def answer(*cells: tuple[int, float, int, float]) -> list[tuple[int, dict[int, float]]]:
    """Of one call: the token with its log probability, and the next likely one with its own."""
    return [(token, {token: own, second: its}) for token, own, second, its in cells]


ROOM = [answer((7, -0.1, 8, -3.0), (9, -0.70, 4, -0.73), (5, -0.2, 6, -2.0))]


def test_equal_rounds_are_at_no_distance() -> None:
    assert distance(ROOM, ROOM, "again", TOLERANCE) == Distance(0.0, 3, 0)


def test_small_differences_pass_and_are_told() -> None:
    other = [answer((7, -0.13, 8, -3.0), (9, -0.70, 4, -0.73), (5, -0.2, 6, -2.0))]
    assert distance(ROOM, other, "host", TOLERANCE).largest == pytest.approx(0.03)


def test_a_near_tie_may_go_the_other_way_and_ends_the_comparison() -> None:
    parted = [answer((7, -0.1, 8, -3.0), (4, -0.71, 9, -0.72), (1, -5.0, 2, -6.0))]
    both = [*ROOM, *ROOM]
    assert distance(both, [*parted, *ROOM], "host", TOLERANCE) == Distance(0.0, 4, 1)


def test_another_token_that_was_not_as_likely_is_wrong() -> None:
    wrong = [answer((8, -0.1, 7, -0.2), (9, -0.7, 4, -0.73), (5, -0.2, 6, -2.0))]
    with pytest.raises(AssertionError, match=r"another token at 0, whose log .* 2\.9 lower"):
        distance(ROOM, wrong, "host", TOLERANCE)
    unlikely = [answer((3, -0.1, 7, -0.2), (9, -0.7, 4, -0.73), (5, -0.2, 6, -2.0))]
    with pytest.raises(AssertionError, match="inf lower"):
        distance(ROOM, unlikely, "host", TOLERANCE)


def test_the_same_token_with_another_probability_is_wrong() -> None:
    wrong = [answer((7, -0.1, 8, -3.0), (9, -0.76, 4, -0.9), (5, -0.2, 6, -2.0))]
    with pytest.raises(AssertionError, match=r"token 1: log .* differ by 0\.06"):
        distance(ROOM, wrong, "host", TOLERANCE)


def test_answers_that_part_early_prove_nothing() -> None:
    parted = [answer((7, -0.1, 8, -3.0), (4, -0.71, 9, -0.72), (1, -5.0, 2, -6.0))]
    with pytest.raises(AssertionError, match="only 1 of 3 tokens could be compared"):
        distance(ROOM, parted, "host", TOLERANCE)


def test_the_tolerance_is_learnt_from_rounds_with_room() -> None:
    assert tolerance_of(Distance(0.0, 10, 0)) == FLOOR
    assert tolerance_of(Distance(0.1, 10, 0)) == pytest.approx(0.4)
    with pytest.raises(AssertionError, match="no other round can prove anything here"):
        tolerance_of(Distance(CEILING + 0.01, 10, 0))
