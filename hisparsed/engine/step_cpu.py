"""CPU time that the engine thread spends around a step: scheduling and processing the output.

The model's own time is not in it: the executor runs between the two. Thread time, so that a
thread that waits for a core does not look busy. Engine thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hisparsed.policy.signals import StepCpu

WINDOW_S = 60.0
MOST_STEPS = 2_048
"""Latest steps that are kept, so that a report sorts few numbers however short steps are."""


class StepCpuTimes:
    """``cpu_s`` is the thread's CPU time so far; it is read four times per step."""

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._cpu_s = cpu_s
        self._scheduled: deque[float] = deque(maxlen=64)
        """Of steps whose output has not come; asynchronous scheduling is ahead of it."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        began_s = self._cpu_s()
        yield
        self._scheduled.append(self._cpu_s() - began_s)

    @contextmanager
    def taking_output(self, now_s: float) -> Iterator[None]:
        """Of the oldest step that was scheduled."""
        began_s = self._cpu_s()
        yield
        scheduled_s = self._scheduled.popleft() if self._scheduled else 0.0
        self.add(now_s, scheduled_s + self._cpu_s() - began_s)

    def add(self, now_s: float, cost_s: float) -> None:
        """A step whose output arrived at ``now_s``."""
        self._steps.append((now_s, cost_s))

    def figures(self, now_s: float) -> StepCpu | None:
        """Of the steps of the last minute; ``None`` where there was none."""
        while self._steps and self._steps[0][0] < now_s - WINDOW_S:
            self._steps.popleft()
        times = sorted(cost_s for _, cost_s in self._steps)
        if not times:
            return None
        return StepCpu(
            times[len(times) // 2],
            times[min(len(times) - 1, len(times) * 99 // 100)],
            self._busy_ratio(now_s),
        )

    def _busy_ratio(self, now_s: float) -> float | None:
        """Since the first step that is kept; its own cost was before that."""
        since_s, first_cost_s = self._steps[0]
        if len(self._steps) < 2 or now_s <= since_s:
            return None
        spent_s = sum(cost_s for _, cost_s in self._steps) - first_cost_s
        return min(1.0, spent_s / (now_s - since_s))


class DescribedCpuTimes(StepCpuTimes):
    """For a simulated node: the cost of steps comes from its description, not from the machine that
    simulates it. ``add`` is the only source."""

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        yield

    @contextmanager
    def taking_output(self, now_s: float) -> Iterator[None]:
        yield
