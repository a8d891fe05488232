"""Lowest, highest, rate and smoothed value of a signal, in bounded memory.

Samples of a window fall into buckets, so an hour costs as much as a minute; it covers the
asked span and at most one bucket more. Time is data: nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BUCKETS = 48


@dataclass(frozen=True, slots=True)
class Bucket:
    start_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Window:
    """Immutable; ``push`` returns the next one."""

    buckets: tuple[Bucket, ...] = ()
    since_s: float = 0.0
    """When uninterrupted observation began."""
    last_s: float = 0.0

    def push(self, at_s: float, value: float, span_s: float, max_gap_s: float) -> Window:
        """The window with one more sample; a gap over ``max_gap_s`` starts it anew."""
        if not self.buckets or at_s - self.last_s > max_gap_s:
            return Window((Bucket(at_s, value, value),), at_s, at_s)
        buckets, newest = self.buckets, self.buckets[-1]
        if at_s - newest.start_s < span_s / _BUCKETS:
            merged = Bucket(newest.start_s, min(newest.low, value), max(newest.high, value))
            buckets = (*buckets[:-1], merged)
        else:
            buckets = (*buckets, Bucket(at_s, value, value))
        drop = 0
        while drop + 1 < len(buckets) and buckets[drop + 1].start_s <= at_s - span_s:
            drop += 1
        return Window(buckets[drop:], self.since_s, at_s)

    def full(self, span_s: float) -> bool:
        """Whether ``span_s`` was observed without a gap."""
        return bool(self.buckets) and self.last_s - self.since_s >= span_s

    @property
    def low(self) -> float:
        """Lowest value; of an empty window, 0."""
        return min((bucket.low for bucket in self.buckets), default=0.0)

    @property
    def high(self) -> float:
        """Highest value; of an empty window, 0."""
        return max((bucket.high for bucket in self.buckets), default=0.0)

    @property
    def observed_s(self) -> float:
        """Time between the oldest and the newest sample held."""
        return self.last_s - self.buckets[0].start_s if self.buckets else 0.0

    @property
    def rise(self) -> float:
        """By how much a counter rose in the window."""
        return self.high - self.low

    @property
    def rate_per_s(self) -> float | None:
        """How fast a counter rose; ``None`` before two samples at different times."""
        return self.rise / self.observed_s if self.observed_s > 0 else None


@dataclass(frozen=True, slots=True)
class Ewma:
    """A smoothed signal whose older samples fade with a time constant; immutable."""

    value: float | None = None
    """``None`` before the first sample."""
    last_s: float = 0.0

    def push(self, at_s: float, value: float, time_constant_s: float, max_gap_s: float) -> Ewma:
        """With one more sample; a gap over ``max_gap_s`` starts anew."""
        elapsed_s = at_s - self.last_s
        if self.value is None or elapsed_s > max_gap_s:
            return Ewma(float(value), at_s)
        kept = math.exp(-elapsed_s / time_constant_s)
        return Ewma(value + (self.value - value) * kept, at_s)
