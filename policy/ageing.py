"""How long a call may be passed over, from how long calls wait anyway.

When held prefixes go first, ageing bounds the unfairness. A bound near the natural queueing
time ages nearly every call, and the order becomes that of arrival again; so the bound is
kept several queueing times away, on a coarse scale so that it seldom changes.
"""

from __future__ import annotations

import math

from hisparsed.policy.memory import QUEUE_SPAN_S, Memory
from hisparsed.policy.schema import Policy

LEAST_S = 30.0
_QUEUES = 4.0
"""Queueing times that a call may be passed over for."""
_LET_GO = 2.0
"""The bound comes down only once it is this many times too long."""


def natural_wait_s(memory: Memory) -> float | None:
    """How long a call waits in order of arrival: waiting calls / calls that end a second.

    Little's law on the smoothed queue. ``None`` while calls wait and none has ended, or the
    pace was not observed for ``QUEUE_SPAN_S`` / 5.
    """
    waiting, finished = memory.signals.queue_waiting.value, memory.signals.queue_finished_total
    if waiting is None or not finished.full(QUEUE_SPAN_S / 5):
        return None
    if waiting < 0.5:
        return 0.0
    pace = finished.rate_per_s
    return waiting / pace if pace else None


def ageing_s(policy: Policy, memory: Memory, in_force_s: float) -> float:
    """The ageing bound to have: the policy's, or by the queue; never above ``max_wait``."""
    settings = policy.admission
    if not isinstance(settings.ageing, str):
        return settings.ageing
    kept = min(in_force_s, settings.max_wait)
    wait_s = natural_wait_s(memory)
    if wait_s is None:
        return kept
    wanted = min(_on_scale(_QUEUES * wait_s), settings.max_wait)
    if wanted > kept or wanted * _LET_GO < kept:
        return wanted
    return kept


def start_ageing_s(policy: Policy) -> float:
    """The bound before anything was observed."""
    settings = policy.admission
    if not isinstance(settings.ageing, str):
        return settings.ageing
    return min(LEAST_S, settings.max_wait)


def _on_scale(seconds: float) -> float:
    """The next of 30 s, 1 min, 2 min, 4 min, ..."""
    if seconds <= LEAST_S:
        return LEAST_S
    return LEAST_S * 2.0 ** math.ceil(math.log2(seconds / LEAST_S) - 1e-9)
