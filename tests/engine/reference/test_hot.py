"""Hot buffers of the reference node: turns with the scratch, and rows that are written again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsed.engine.reference import hot as hot_module
from hisparsed.engine.reference.hot import ReferenceHotBuffers, Wave, most_spills, plan_waves
from hisparsed.engine.reference.requests import ScheduledTokens


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


class Rewrites:
    """A ``ReferenceHotBuffers`` of two index groups that only tracks what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forgotten: list[tuple[str, int, int]] = []
        hot: Any = ReferenceHotBuffers.__new__(ReferenceHotBuffers)
        hot._written_to = [0, 0]
        hot._states = ["group 0", "group 1"]
        monkeypatch.setattr(hot_module, "invalidate", self._invalidate)
        self._hot = hot

    def _invalidate(self, state: str, rows: Any, positions: Any) -> None:
        pairs = zip(rows.tolist(), positions.tolist(), strict=True)
        self.forgotten.extend((state, row, position) for row, position in pairs)

    def step(self, *segments: ScheduledTokens) -> list[tuple[str, int, int]]:
        self.forgotten.clear()
        self._hot.rewritten(segments)
        return list(self.forgotten)


def test_rows_of_rejected_drafts_are_forgotten_in_every_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrites = Rewrites(monkeypatch)
    assert rewrites.step(ScheduledTokens("r", 1, 10, 4, drafts=(5, 6, 7))) == []
    # One draft was right: position 11 stands, 12 and 13 come again.
    assert rewrites.step(ScheduledTokens("r", 1, 12, 4, drafts=(5, 6, 7))) == [
        (group, 1, position) for group in ("group 0", "group 1") for position in (12, 13)
    ]


def test_rows_that_are_new_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites = Rewrites(monkeypatch)
    rewrites.step(ScheduledTokens("r", 1, 10, 4, drafts=(5, 6, 7)))
    assert rewrites.step(ScheduledTokens("r", 1, 14, 1), ScheduledTokens("s", 0, 0, 20)) == []


def test_rejection_after_a_short_step_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites = Rewrites(monkeypatch)
    rewrites.step(ScheduledTokens("r", 0, 10, 4, drafts=(5, 6, 7)))
    assert [position for _, _, position in rewrites.step(ScheduledTokens("r", 0, 11, 1))] == [
        11,
        11,
    ]
    assert [position for _, _, position in rewrites.step(ScheduledTokens("r", 0, 12, 1))] == [
        12,
        12,
    ]
