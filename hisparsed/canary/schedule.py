"""When the canary is asked, and when it is left out: pure, time comes from outside.

Once at the start, then by time and by how much memory moved. A node with more work than it can
do is left alone, and what was left out is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from hisparsed.policy.schema_watch import Canary


class Trigger(StrEnum):
    """Why a round is asked."""

    START = "start"
    PERIOD = "period"
    MOVE = "move"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The node at one tick. Blocks are host blocks."""

    now_s: float
    waiting: int
    coverage_low: bool
    offload_target_blocks: int
    budget_blocks: int
    moving: bool
    """Blocks are promised or recalled and have not moved yet."""


class Schedule:
    """One engine life. Call ``look`` every tick, ``ran`` when a round has begun."""

    def __init__(self) -> None:
        self.left_out = 0
        self._last_s = -math.inf
        self._tried_s = -math.inf
        self._target: int | None = None
        self._moved = 0

    def look(self, settings: Canary, seen: Conditions) -> Trigger | None:
        """Why a round should begin now; ``None`` when none should."""
        if self._target is not None:
            self._moved += abs(seen.offload_target_blocks - self._target)
        self._target = seen.offload_target_blocks
        due = self._due(settings, seen)
        if due is None or seen.now_s - self._tried_s < settings.least_gap:
            return None
        if seen.waiting > settings.most_waiting or seen.coverage_low:
            self.left_out += 1
            self._tried_s = seen.now_s
            return None
        return due

    def _due(self, settings: Canary, seen: Conditions) -> Trigger | None:
        if self._last_s == -math.inf:
            return Trigger.START
        if seen.now_s - self._last_s >= settings.every:
            return Trigger.PERIOD
        # What still moves is looked at when it has arrived.
        if self._moved >= settings.after_move * seen.budget_blocks and not seen.moving:
            return Trigger.MOVE
        return None

    def ran(self, now_s: float) -> None:
        """A round has begun, whoever asked for it."""
        self._last_s = self._tried_s = now_s
        self._moved = 0
