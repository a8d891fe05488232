"""Seconds in steps that only decode: the time that more running requests would share.

A step with prefill in it is as long as its prefill, however many requests decode beside it. Told
of every scheduling pass; a step lasts until the next pass, where requests ran on.
"""

from __future__ import annotations

from collections.abc import Iterable


class DecodeTime:
    """``query_len``: most tokens of a decoding request in one step."""

    def __init__(self, query_len: int) -> None:
        self._query_len = query_len
        self._began_s = 0.0
        self._decodes = False
        self.seconds = 0.0

    def pass_begins(self, now_s: float, running: bool) -> None:
        """``running``: whether requests of the step before still run; else there was a pause."""
        if self._decodes and running:
            self.seconds += max(0.0, now_s - self._began_s)
        self._began_s = now_s

    def pass_ended(self, scheduled: Iterable[int]) -> None:
        """``scheduled``: tokens of each request in the step that follows this pass."""
        self._decodes = 0 < max(scheduled, default=0) <= self._query_len
