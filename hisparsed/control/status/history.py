"""The last two hours as a table of numbers, so that a view that opens now is not empty.

Raw gauges and counters of the status document, every second for five minutes and every five seconds
before that: bounded memory. The reader derives rates. Not the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hisparsed.control.live_policy import LEAST_JUMP_S
from hisparsed.control.status.current import TickOutcome
from hisparsed.policy.derived import HISTORY, HOT_ROWS, Derived, derive
from hisparsed.policy.signals import Snapshot

FINE_S = 1.0
FINE_SPAN_S = 300.0
COARSE_S = 5.0
SPAN_S = 7_200.0

Row = tuple[float | None, ...]
_take: Callable[[Any], Row] = attrgetter(*HISTORY)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The two parts of the status document that history is taken from."""

    observed: Snapshot
    derived: Derived


def row_of(snapshot: Snapshot) -> Row:
    """The columns ``HISTORY`` of one tick."""
    row = _take(_Shown(snapshot, derive(snapshot)))
    if snapshot.hot.counted:
        return row
    return tuple(
        None if name in HOT_ROWS else value for name, value in zip(HISTORY, row, strict=True)
    )


class History:
    """Two rings: fine for the latest minutes, coarse for the whole span."""

    def __init__(self) -> None:
        # One more than the span holds, so that the rows reach back over the whole span.
        self._fine: deque[Row] = deque(maxlen=round(FINE_SPAN_S / FINE_S) + 1)
        self._coarse: deque[Row] = deque(maxlen=round(SPAN_S / COARSE_S) + 1)
        self._apart_s: float | None = None

    def watch(self, outcome: TickOutcome) -> None:
        """Take in a finished tick; ticks that come more often than the fine step are omitted."""
        at_unix_s = outcome.record.at_unix_s
        self._follow_clock(at_unix_s, at_unix_s - outcome.record.snapshot.at_s)
        if not _due(self._fine, at_unix_s, FINE_S):
            return
        row = (at_unix_s, *row_of(outcome.record.snapshot))
        self._fine.append(row)
        if _due(self._coarse, at_unix_s, COARSE_S):
            self._coarse.append(row)

    def _follow_clock(self, at_unix_s: float, apart_s: float) -> None:
        """Keep ages correct after the clock was set, so that charts have no overlap and no gap."""
        before_s, self._apart_s = self._apart_s, apart_s
        jump_s = 0.0 if before_s is None else apart_s - before_s
        if abs(jump_s) < LEAST_JUMP_S:
            return
        for ring in (self._fine, self._coarse):
            moved = [(_time(row) + jump_s, *row[1:]) for row in ring]
            ring.clear()
            ring.extend(row for row in moved if _time(row) < at_unix_s)

    def document(self, span_s: float = SPAN_S) -> dict[str, Any]:
        """``columns`` and ``rows``, oldest first; times are Unix seconds in the first column."""
        newest = self._fine[-1][0] if self._fine else None
        begin = -1.0 if newest is None else newest - span_s
        fine_from = _time(self._fine[0]) if self._fine else 0.0
        rows = [row for row in self._coarse if begin <= _time(row) < fine_from]
        rows += [row for row in self._fine if _time(row) >= begin]
        return {"columns": ["at_unix_s", *HISTORY], "rows": rows}


def _due(ring: deque[Row], at_unix_s: float, step_s: float) -> bool:
    """Whether a step has passed. Ticks jitter a little."""
    return not ring or at_unix_s - _time(ring[-1]) >= 0.95 * step_s


def _time(row: Row) -> float:
    return row[0] or 0.0
