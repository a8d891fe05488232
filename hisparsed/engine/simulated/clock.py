"""Virtual time: moves when it is told to, never by itself."""

from __future__ import annotations

START_UNIX_S = 1_767_225_600.0
"""Every simulation begins at the start of 2026, so that equal runs leave equal journals."""


class VirtualClock:
    """Seconds since the simulation began."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return START_UNIX_S + self._now_s

    def advance(self, seconds: float) -> None:
        """Raises ``ValueError`` for a step back."""
        if seconds < 0:
            raise ValueError(f"virtual time cannot go back by {-seconds} s")
        self._now_s += seconds

    def advance_to(self, at_s: float) -> None:
        """Go to ``at_s``; a time that has passed changes nothing."""
        self._now_s = max(self._now_s, at_s)
