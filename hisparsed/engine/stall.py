"""Finds "nothing runs, something waits, memory is free", and says what to try next.

A pure state machine over one picture a step; the scheduler carries the remedies out. Known
causes are cured where they arise. This is for those that nobody knows yet: remedies go
from harmless to costly, and the last one fails one call so that the others are served. A
pool that is busy with transfers, or paused on purpose, is not stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Remedy(StrEnum):
    """What to try, in this order."""

    LIFT_LIMIT = "lift-limit"
    """Let at least one call run."""
    NEXT_IN_LINE = "next-in-line"
    """Move the head of the queue behind the others, once for each that waits."""
    FORGET_PREFIX = "forget-prefix"
    """Let the head recompute its prompt instead of loading its prefix."""
    GIVE_UP = "give-up"
    """Fail the head with an error that names what it needed."""


@dataclass(frozen=True, slots=True)
class StepPicture:
    """What one scheduling pass left behind."""

    now_s: float
    running: int
    waiting: int
    scheduled_tokens: int
    transfers: bool
    """Copies or loads are in flight that could free memory or end a wait."""
    paused: bool


@dataclass(frozen=True, slots=True)
class StallLimits:
    """``after_s`` without progress is a stall; ``between_s`` from remedy to remedy."""

    after_s: float = 1.0
    between_s: float = 0.2
    give_up_after_s: float = 30.0


@dataclass(slots=True)
class StallCounts:
    """Cumulative, for the report."""

    found: int = 0
    resolved: int = 0
    given_up: int = 0


class StallWatch:
    """One scheduler's. Call ``step`` after each scheduling pass."""

    def __init__(self, limits: StallLimits | None = None) -> None:
        self._limits = limits or StallLimits()
        self._idle_since_s: float | None = None
        self._next_at_s = 0.0
        self._left: list[Remedy] = []
        self._stalled = False
        self.counts = StallCounts()

    @property
    def stalled(self) -> bool:
        return self._stalled

    def step(self, picture: StepPicture) -> Remedy | None:
        """The remedy to carry out now, or none."""
        if not _idle_with_work(picture):
            self._clear(progress=bool(picture.running or picture.scheduled_tokens))
            return None
        if self._idle_since_s is None:
            self._idle_since_s = picture.now_s
        idle_s = picture.now_s - self._idle_since_s
        if idle_s < self._limits.after_s:
            return None
        if not self._stalled:
            self._stalled = True
            self.counts.found += 1
            self._left = _remedies(picture.waiting)
            self._next_at_s = picture.now_s
        if picture.now_s < self._next_at_s:
            return None
        if self._left:
            self._next_at_s = picture.now_s + self._limits.between_s
            return self._left.pop(0)
        if idle_s < self._limits.give_up_after_s:
            return None
        self.counts.given_up += 1
        self._idle_since_s = None
        self._stalled = False
        return Remedy.GIVE_UP

    def _clear(self, *, progress: bool) -> None:
        if self._stalled and progress:
            self.counts.resolved += 1
        self._stalled = False
        self._idle_since_s = None


def _idle_with_work(picture: StepPicture) -> bool:
    moving = picture.running or picture.scheduled_tokens or picture.transfers
    return bool(picture.waiting) and not moving and not picture.paused


def _remedies(waiting: int) -> list[Remedy]:
    others: Sequence[Remedy] = [Remedy.NEXT_IN_LINE] * (waiting - 1)
    # With all tried in turn the first head is at the head again once it has moved once more.
    back = [Remedy.NEXT_IN_LINE] if others else []
    return [Remedy.LIFT_LIMIT, *others, *back, Remedy.FORGET_PREFIX]
