"""The last two hours of one node as numbers, and the series that charts draw from them.

Samples are raw gauges and counters; rates and ratios come from differences between samples, so a
counter that decreases (a restarted engine) makes a gap and never a spike. Bounded memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.policy.derived import HISTORY, HOT_ROWS
from hisparsed.tui.wire import Document, dig, finite, number

SPAN_S = 7_200.0
FINE_S = 0.9
FINE_SPAN_S = 300.0
COARSE_S = 4.75

_INDEX = {name: index for index, name in enumerate(HISTORY)}
Values = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """``top`` alone is a gauge, or a rate a second when ``rate``; over ``bottom`` a ratio.

    ``unit`` is a name of ``views.drawing.UNITS``.
    """

    name: str
    title: str
    unit: str
    top: str
    bottom: tuple[str, ...] = ()
    rate: bool = False


SERIES = {
    series.name: series
    for series in (
        Series("tokens", "tokens out", "per_s", "observed.tokens.generated_total", rate=True),
        Series("prompt", "tokens in", "per_s", "observed.tokens.prompt_total", rate=True),
        Series(
            "finished", "calls finished", "per_s", "observed.requests.finished_total", rate=True
        ),
        Series("running", "calls running", "count", "observed.requests.running"),
        Series("waiting", "calls waiting", "count", "observed.requests.waiting"),
        Series(
            "preempted", "preemptions", "per_s", "observed.requests.preemptions_total", rate=True
        ),
        Series(
            "prefix",
            "prefix hits",
            "share",
            "observed.prefix.hit_tokens_total",
            ("observed.prefix.query_tokens_total",),
        ),
        Series(
            "miss",
            "hot misses",
            "share",
            "observed.hot.loads_total",
            ("observed.hot.hits_total", "observed.hot.loads_total"),
        ),
        Series("h2d", "rows loaded H2D", "bytes/s", "observed.hot.h2d_bytes_total", rate=True),
        Series(
            "ttft",
            "first token",
            "seconds",
            "observed.latencies.ttft_sum_s",
            ("observed.latencies.ttft_count",),
        ),
        Series(
            "itl",
            "between tokens",
            "seconds",
            "observed.latencies.itl_sum_s",
            ("observed.latencies.itl_count",),
        ),
        Series("coverage", "coverage", "ratio", "derived.coverage"),
        Series("multiplier", "multiplier", "times", "observed.hot.multiplier"),
        Series("offload", "offload pool", "bytes", "derived.pools.offload.capacity_bytes"),
        Series("gpu_free", "GPU blocks free", "count", "observed.gpu.free_blocks"),
    )
}
WINDOW_S = 60.0
"""The window of every rate and ratio that is shown as a number: pages say "in 1m"."""
_DIFFERENCES = {name for name, series in SERIES.items() if series.rate or series.bottom}


def is_difference(name: str) -> bool:
    """Whether a series is made of differences between samples, and not a gauge."""
    return name in _DIFFERENCES


def values_of(status: object) -> Values:
    """A sample from a status document."""
    uncounted = dig(status, "observed.hot.counted") is False
    return tuple(
        None if uncounted and path in HOT_ROWS else number(status, path) for path in HISTORY
    )


class ChartHistory:
    """Samples by time: about one per second for five minutes, one in five seconds before that."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._values: list[Values] = []
        self._passed_s: float | None = None

    def __len__(self) -> int:
        return len(self._times)

    @property
    def newest_s(self) -> float | None:
        """The time up to which the node is known: of the last sample, or later if none came
        since."""
        if not self._times:
            return None
        return max(self._times[-1], self._passed_s or 0.0)

    def pass_to(self, at_unix_s: float) -> None:
        """Nothing was measured up to this time; earlier samples are not current."""
        self._passed_s = at_unix_s

    def copy(self) -> ChartHistory:
        other = ChartHistory()
        other._times, other._values = self._times.copy(), self._values.copy()
        other._passed_s = self._passed_s
        return other

    def clear(self) -> None:
        self._times.clear()
        self._values.clear()
        self._passed_s = None

    def add(self, at_unix_s: float, values: Values) -> None:
        """Samples that come too soon or out of order are omitted."""
        if self._times and at_unix_s - self._times[-1] < FINE_S:
            return
        self._times.append(at_unix_s)
        self._values.append(values)
        if len(self._times) % 64 == 0:
            self._thin()

    def load(self, document: Document) -> None:
        """Insert the rows of ``/v1/history`` before the samples that are here already."""
        columns = document.get("columns")
        rows = document.get("rows")
        if not isinstance(columns, list) or not isinstance(rows, list):
            return
        places = [columns.index(name) if name in columns else None for name in HISTORY]
        begin = self._times[0] if self._times else float("inf")
        older = [
            row
            for row in rows
            if isinstance(row, list)
            and len(row) == len(columns)
            and (at_s := finite(row[0])) is not None
            and at_s < begin
        ]
        self._times = [float(row[0]) for row in older] + self._times
        values = [tuple(None if at is None else finite(row[at]) for at in places) for row in older]
        self._values = values + self._values
        self._thin()

    def latest(self, name: str, window_s: float = WINDOW_S) -> float | None:
        """A rate or ratio over the last ``window_s``; a gauge's last value."""
        if self.newest_s is None:
            return None
        if not is_difference(name) and self._times[-1] == self.newest_s:
            return self._values[-1][_INDEX[SERIES[name].top]]
        return self.buckets(name, window_s, 1, end_s=self.newest_s)[0]

    def buckets(self, name: str, span_s: float, count: int, *, end_s: float) -> list[float | None]:
        """``count`` values for equal parts of the time up to ``end_s``, oldest first.

        A part without a sample takes the difference over it from its neighbours (coarse
        samples, short parts), or the last gauge; before the first sample it is ``None``.
        """
        if count < 1:
            return []
        series = SERIES[name]
        step_s = span_s / count
        edges = [end_s - span_s + step_s * index for index in range(count + 1)]
        # The sample at or before an edge; -1 before the first.
        places = [bisect_left(self._times, edge + 1e-6) - 1 for edge in edges]
        if name in _DIFFERENCES:
            return [
                self._difference(series, places[index], places[index + 1]) for index in range(count)
            ]
        column = _INDEX[series.top]
        return [
            self._mean(column, places[index] + 1, places[index + 1] + 1) for index in range(count)
        ]

    def _mean(self, column: int, first: int, beyond: int) -> float | None:
        found = [
            value for values in self._values[first:beyond] if (value := values[column]) is not None
        ]
        if found:
            return sum(found) / len(found)
        # No sample inside: the one before still holds, unless it is old.
        if first == beyond and 0 < first < len(self._times):
            return self._values[first - 1][column]
        return None

    def _difference(self, series: Series, first: int, last: int) -> float | None:
        if first == last:
            # A part between two samples: the difference between them.
            last += 1
        first = max(first, 0)
        if not first < last < len(self._times):
            return None
        before, after = self._values[first], self._values[last]
        top = _delta(before, after, series.top)
        if top is None:
            return None
        if series.rate:
            return top / (self._times[last] - self._times[first])
        parts = [_delta(before, after, name) for name in series.bottom]
        bottom = sum(part for part in parts if part is not None)
        return top / bottom if bottom > 0 else None

    def _thin(self) -> None:
        """Keep one in five seconds of samples older than five minutes, none beyond the span."""
        if not self._times:
            return
        newest = self._times[-1]
        fine_from, begin = newest - FINE_SPAN_S, newest - SPAN_S - COARSE_S
        times: list[float] = []
        values: list[Values] = []
        for at, sample in zip(self._times, self._values, strict=True):
            if at < begin or (at < fine_from and times and at - times[-1] < COARSE_S):
                continue
            times.append(at)
            values.append(sample)
        self._times, self._values = times, values


def _delta(before: Values, after: Values, name: str) -> float | None:
    index = _INDEX[name]
    start, end = before[index], after[index]
    if start is None or end is None or end < start:
        return None
    return end - start


def known(values: Sequence[float | None]) -> list[float]:
    """Without the gaps."""
    return [value for value in values if value is not None]
