"""How long an engine has been silent, as heard by a daemon that was itself awake.

A machine that slept, a container that was frozen, a daemon that was stopped: an engine that slept
along is not to be taken for one that hangs. Pure: times come from outside.
"""

from __future__ import annotations

MOST_A_LOOK_S = 2.0
"""What one look adds at most; many times longer than looks are apart."""


class Silence:
    """``now_s`` and ``reported_at_s`` are monotonic seconds. Call ``since_report_s`` often."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._reported_at_s = now_s
        self._silent_s = 0.0

    def since_report_s(self, now_s: float, reported_at_s: float) -> float:
        """Seconds without a report in which somebody listened."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if reported_at_s != self._reported_at_s:
            self._reported_at_s, self._silent_s = reported_at_s, 0.0
            passed_s = min(passed_s, now_s - reported_at_s)
        self._silent_s += min(passed_s, MOST_A_LOOK_S)
        return self._silent_s
