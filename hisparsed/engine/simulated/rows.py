"""How many rows a decode step selects and how many of them miss: a fitted model, pure.

Misses follow a curve over hot rows / selected rows, published for single rows and replaceable
in the node's description. Selection is taken to be even over the pages of a context, so rows of
resident pages miss nothing and leave the hot buffer to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Distinct rows of one index group that one request's step selects, by where they were."""

    selected: float
    resident: float
    hits: float
    loads: float
    """Read from the host and kept."""
    spills: float
    """Read from the host for this step only: they do not fit the hot buffer."""


NO_ROWS = RowCounts(0.0, 0.0, 0.0, 0.0, 0.0)


class RowModel:
    """``miss_curve`` [(hot rows / selected rows, misses)], ``union`` distinct rows / top-k."""

    def __init__(
        self, topk: int, miss_curve: Sequence[tuple[float, float]], union: Sequence[float]
    ) -> None:
        self.topk = topk
        self._curve = tuple(miss_curve)
        self._union = tuple(union)

    def selected(self, context: int, rows: int) -> float:
        """Distinct tokens that ``rows`` neighbouring rows select of ``context``."""
        return min(float(context), self.topk * self._union[min(rows, len(self._union)) - 1])

    def misses(self, ratio: float) -> float:
        """Share of selected rows that miss at ``ratio`` hot rows a selected row."""
        first, last = self._curve[0], self._curve[-1]
        if ratio <= first[0]:
            # Nothing hits without a buffer.
            return 1.0 - (1.0 - first[1]) * max(0.0, ratio) / first[0]
        if ratio >= last[0]:
            return last[1]
        for (low, high_miss), (high, low_miss) in zip(self._curve, self._curve[1:], strict=False):
            if ratio <= high:
                part = math.log(ratio / low) / math.log(high / low)
                return high_miss + (low_miss - high_miss) * part
        raise AssertionError("the curve ends above every ratio that comes here")

    def step(
        self,
        context: int,
        rows: int,
        resident_share: float,
        hot_rows: int,
        locality: float = 1.0,
    ) -> RowCounts:
        """One decode step of a request with ``hot_rows`` in its hot buffer a group.

        It misses as one of the mean with ``locality`` times the buffer.
        """
        selected = self.selected(context, rows)
        resident = selected * resident_share
        from_host = selected - resident
        # A buffer as large as all of the context's host pages misses nothing once it is warm.
        if from_host <= 0 or hot_rows >= context * (1 - resident_share):
            return RowCounts(selected, resident, from_host, 0.0, 0.0)
        missing = from_host * self.misses(locality * hot_rows / from_host)
        spills = min(missing, max(0.0, from_host - hot_rows))
        return RowCounts(selected, resident, from_host - missing, missing - spills, spills)
