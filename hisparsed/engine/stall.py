"""Stalls, in which nothing runs, a call waits and memory is free: their detection and the remedies.

``StallWatch`` is a pure state machine with one input per step; the scheduler carries the remedies
out. They are ordered from harmless to costly, and the last one fails one call so that the others
are served. A pool that is busy with transfers, or paused on purpose, is not stalled.

One cause is known and handled directly: a call whose prefix was loaded keeps its blocks until it
runs, and vLLM preempts running calls only, so two such calls can hold the blocks that the other
needs. The youngest then returns its blocks and restarts like a preempted call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm.v1.request import RequestStatus

from hisparsed.engine.compat.adapters import holders, remove_holder


class Remedy(StrEnum):
    """The remedies, in this order."""

    LIFT_LIMIT = "lift-limit"
    """Let at least one call run."""
    NEXT_IN_LINE = "next-in-line"
    """Move the head of the queue behind the others, once for each waiting call."""
    FORGET_PREFIX = "forget-prefix"
    """Make the head recompute its prompt instead of loading its prefix."""
    GIVE_UP = "give-up"
    """Fail the head with an error that names the blocks it needed."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The state after one scheduling pass."""

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
    """For one scheduler. Call ``step`` after each scheduling pass."""

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

    def step(self, facts: StepFacts) -> Remedy | None:
        """The remedy to carry out now, or none."""
        if not _idle_with_work(facts):
            self._clear(progress=bool(facts.running or facts.scheduled_tokens))
            return None
        if self._idle_since_s is None:
            self._idle_since_s = facts.now_s
        idle_s = facts.now_s - self._idle_since_s
        if idle_s < self._limits.after_s:
            return None
        if not self._stalled:
            self._stalled = True
            self.counts.found += 1
            self._left = _remedies(facts.waiting)
            self._next_at_s = facts.now_s
        if facts.now_s < self._next_at_s:
            return None
        if self._left:
            self._next_at_s = facts.now_s + self._limits.between_s
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


def _idle_with_work(facts: StepFacts) -> bool:
    moving = facts.running or facts.scheduled_tokens or facts.transfers
    return bool(facts.waiting) and not moving and not facts.paused


def _remedies(waiting: int) -> list[Remedy]:
    others: Sequence[Remedy] = [Remedy.NEXT_IN_LINE] * (waiting - 1)
    # When all have been tried in turn, one more move puts the first head back at the head.
    back = [Remedy.NEXT_IN_LINE] if others else []
    return [Remedy.LIFT_LIMIT, *others, *back, Remedy.FORGET_PREFIX]


def loads_are_done(scheduler: Any) -> bool:
    """Whether no call that holds blocks still waits for its prefix to arrive."""
    return all(
        request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        or request.request_id in scheduler.finished_recving_kv_req_ids
        for request in holders(scheduler)
    )


def take_back_from_youngest(scheduler: Any, *, least: int = 2) -> Any:
    """Free the blocks of the last call that holds some; returns it, or ``None``.

    ``scheduler`` is vLLM's, between passes, with nothing running and nothing in flight. A single
    call does not wait for another, so it keeps its blocks unless ``least`` is 1.
    """
    holding = holders(scheduler)
    if len(holding) < least or not loads_are_done(scheduler):
        return None
    request = holding[-1]
    remove_holder(scheduler, request)
    # The end of the old load must not be taken for the end of the next one.
    scheduler.finished_recving_kv_req_ids.discard(request.request_id)
    scheduler.failed_recving_kv_req_ids.discard(request.request_id)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    preempted = bool(request.num_preemptions)
    request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
    scheduler.waiting.prepend_request(request)
    return request
