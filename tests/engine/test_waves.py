"""Turns with the scratch: planned from leases, whole requests, never more than it holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.engine.reference.waves import Wave, most_spills, plan_waves


@pytest.mark.parametrize(
    ("rows", "context", "capacity", "spills"),
    [
        (4, 5000, 64, 192),
        (4, 5000, 256, 0),
        (4, 5000, 320, 0),
        (1, 5000, 64, 0),
        (4, 100, 64, 36),
        (4, 5000, 0, 0),
    ],
    ids=["1x", "union", "above", "one row", "short context", "nothing on the host"],
)
def test_spills_are_what_the_rows_can_select_beyond_the_lease(
    rows: int, context: int, capacity: int, spills: int
) -> None:
    assert most_spills(rows=rows, context=context, topk=64, capacity=capacity) == spills


def test_requests_that_fit_together_share_a_wave() -> None:
    assert plan_waves([4, 4, 4], [100, 100, 100], 200) == (Wave(0, 8), Wave(8, 12))


def test_a_step_without_spills_is_one_wave_even_without_scratch() -> None:
    assert plan_waves([1] * 5, [0] * 5, 0) == (Wave(0, 5),)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=20),
    st.integers(100, 300),
)
def test_waves_cover_all_rows_and_none_exceeds_the_scratch(
    requests: list[tuple[int, int]], scratch_rows: int
) -> None:
    rows, spills = [count for count, _ in requests], [needed for _, needed in requests]
    waves = plan_waves(rows, spills, scratch_rows)
    assert waves[0].start == 0
    assert waves[-1].stop == sum(rows)
    assert all(left.stop == right.start for left, right in itertools.pairwise(waves))
    ends = [sum(rows[: index + 1]) for index in range(len(rows))]
    for wave in waves:
        inside = [
            needed
            for count, end, needed in zip(rows, ends, spills, strict=True)
            if wave.start <= end - count and end <= wave.stop
        ]
        assert inside
        assert sum(inside) <= scratch_rows
    assert {wave.stop for wave in waves} <= set(ends)
