"""Notices that somebody set the machine's clock, by a clock that nobody can set.

Small corrections, as time services make them all the time, are none. Not here: what follows.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_JUMP_S = 2.0
_LONGEST_READ_S = 0.5


class ClockJump:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._apart_s = wall_clock() - clock()

    def since_last_s(self) -> float:
        """By how much the wall clock was set since it was last asked; 0 when it was not."""
        before_s = self._clock()
        wall_s = self._wall_clock()
        if self._clock() - before_s > _LONGEST_READ_S:
            return 0.0  # stopped between the two clocks, which says nothing
        jump_s = wall_s - before_s - self._apart_s
        self._apart_s += jump_s
        return jump_s if abs(jump_s) >= LEAST_JUMP_S else 0.0
