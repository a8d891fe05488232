"""Rows of rejected drafts are written again: their hot copies must be forgotten first."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.engine.reference import hot as hot_module
from hisparsed.engine.reference.hot import HotBuffers
from hisparsed.engine.reference.step import Segment


class Rewrites:
    """A ``HotBuffers`` of two index groups that only tracks what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forgotten: list[tuple[str, int, int]] = []
        hot: Any = HotBuffers.__new__(HotBuffers)
        hot._written_to = [0, 0]
        hot._states = ["group 0", "group 1"]
        monkeypatch.setattr(hot_module, "invalidate", self._invalidate)
        self._hot = hot

    def _invalidate(self, state: str, rows: Any, positions: Any) -> None:
        pairs = zip(rows.tolist(), positions.tolist(), strict=True)
        self.forgotten.extend((state, row, position) for row, position in pairs)

    def step(self, *segments: Segment) -> list[tuple[str, int, int]]:
        self.forgotten.clear()
        self._hot.rewritten(segments)
        return list(self.forgotten)


def test_rows_of_rejected_drafts_are_forgotten_in_every_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrites = Rewrites(monkeypatch)
    assert rewrites.step(Segment("r", 1, 10, 4, drafts=(5, 6, 7))) == []
    # One draft was right: position 11 stands, 12 and 13 come again.
    assert rewrites.step(Segment("r", 1, 12, 4, drafts=(5, 6, 7))) == [
        (group, 1, position) for group in ("group 0", "group 1") for position in (12, 13)
    ]


def test_rows_that_are_new_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites = Rewrites(monkeypatch)
    rewrites.step(Segment("r", 1, 10, 4, drafts=(5, 6, 7)))
    assert rewrites.step(Segment("r", 1, 14, 1), Segment("s", 0, 0, 20)) == []


def test_rejection_after_a_short_step_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites = Rewrites(monkeypatch)
    rewrites.step(Segment("r", 0, 10, 4, drafts=(5, 6, 7)))
    assert [position for _, _, position in rewrites.step(Segment("r", 0, 11, 1))] == [11, 11]
    assert [position for _, _, position in rewrites.step(Segment("r", 0, 12, 1))] == [12, 12]
