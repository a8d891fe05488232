"""Admission: the order in which calls start, and which calls are held back.

While the live set fits, vLLM's order is best. When it does not fit the smaller reach, calls whose
prefix is still held start first and new sessions are limited. Ageing bounds how long a call may be
passed over: a bound near the natural queueing time would age nearly every call, so it is several
queueing times, on a coarse scale so that it seldom changes. Decides only; the engine keeps the
order, and the API makes calls wait or answers 429.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hisparsed.policy import expectation
from hisparsed.policy.bounds import LEAST_AGEING_S, admission_for
from hisparsed.policy.decisions import Proposal, Reason
from hisparsed.policy.guards import pace
from hisparsed.policy.memory import QUEUE_SPAN_S, Memory
from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, Lever, Snapshot

_QUEUES = 4.0
"""The bound, in queueing times."""
_LET_GO = 2.0
"""The bound falls only when it is this many times too long."""


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
    """The wanted ageing bound: the policy's, or by the queue; never above ``max_wait``."""
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


def _on_scale(seconds: float) -> float:
    """The next of 30 s, 1 min, 2 min, 4 min, ..."""
    if seconds <= LEAST_AGEING_S:
        return LEAST_AGEING_S
    return LEAST_AGEING_S * 2.0 ** math.ceil(math.log2(seconds / LEAST_AGEING_S) - 1e-9)


_HELD_FIRST = AdmissionOrder.HELD_PREFIX_FIRST


def propose_admission(
    policy: Policy, snapshot: Snapshot, memory: Memory
) -> tuple[Proposal, AdmissionRules]:
    """The proposal, and the wanted order with its limits."""
    order, reason, because = _order(policy, snapshot, memory)
    current, most = snapshot.admission, snapshot.geometry.max_num_seqs
    # In order of arrival no call is passed over, so the bound need not follow the queue.
    follows = order is _HELD_FIRST or policy.admission.ageing != "auto"
    bound_s = ageing_s(policy, memory, current.ageing_s) if follows else current.ageing_s
    bound_s = min(bound_s, policy.admission.max_wait)
    wanted = admission_for(policy, most, order, bound_s)
    action = f"keep the {current.order} order"
    if order is not current.order:
        action = f"start calls in {order} instead of {current.order} order"
    elif replace(wanted, ageing_s=current.ageing_s) != current:
        reason, because = Reason.POLICY_VALUE, "the policy's limits differ from those in force"
        action = f"put the policy's limits in force, keeping the {order} order"
    elif wanted != current:
        reason, because = _new_ageing(policy, memory)
        action = f"let calls age for {bound_s:g}s instead of {current.ageing_s:g}s"
    limited_by = None
    asked = policy.admission.max_running
    if asked is not None and asked > most:
        limited_by = Reason.LIMITED_BY_CEILING
        because += f"; max_running {asked} is more than the {most} this node was started with"
    by_load = reason in (Reason.COVERAGE_LOW, Reason.COVERAGE_RECOVERED)
    figures = _figures(policy, snapshot, memory, wanted)
    proposal = Proposal(
        Lever.ADMISSION,
        current.order.value,
        order.value,
        reason,
        limited_by,
        figures,
        action,
        because + _held_back(snapshot),
        expected=expectation.expect_served(snapshot, memory) if by_load else {},
    )
    return proposal, wanted


def left_in_force(snapshot: Snapshot) -> str:
    """In words, the order and limits that stay when the lever is switched off; may be empty."""
    current, parts = snapshot.admission, []
    if current.order is not AdmissionOrder.ARRIVAL:
        parts.append(f"the {current.order} order")
    if current.max_running < snapshot.geometry.max_num_seqs:
        parts.append(f"at most {current.max_running} running requests")
    if current.max_waiting_sessions is not None:
        parts.append(f"new sessions held while {current.max_waiting_sessions} calls wait")
    if current.max_context_tokens is not None:
        parts.append(f"a longest call of {current.max_context_tokens} tokens")
    return ", ".join(parts)


def _order(
    policy: Policy, snapshot: Snapshot, memory: Memory
) -> tuple[AdmissionOrder, Reason, str]:
    settings, current = policy.admission, snapshot.admission.order
    if settings.order != "auto":
        wanted = AdmissionOrder(settings.order)
        reason = Reason.AT_TARGET if wanted is current else Reason.POLICY_VALUE
        return wanted, reason, f"the policy fixes the {wanted} order"
    load = live_load(snapshot, reach_now(snapshot))
    words = f"the idle live set is {load:.0%} of the smaller reach"
    engaged = current is _HELD_FIRST
    if load > settings.engage_at:
        too_soon = None if engaged else _backed_off(policy, snapshot, memory)
        if too_soon is not None:
            return current, Reason.BACKED_OFF, f"{words}, but {too_soon}"
        reason = Reason.AT_TARGET if engaged else Reason.COVERAGE_LOW
        return _HELD_FIRST, reason, f"{words}, above {settings.engage_at:.0%}"
    if not engaged and not snapshot.sessions.live_sessions:
        return current, Reason.NO_TRAFFIC, "no session is live"
    if load >= settings.release_share:
        return current, Reason.IN_DEAD_BAND, f"{words}, between release and engage"
    if not engaged:
        return current, Reason.NO_BENEFIT, f"{words}, so it fits"
    window = memory.signals.release_load
    if not window.full(settings.release_after) or window.high >= settings.release_share:
        because = f"{words}, but was not for all of {settings.release_after:g}s"
        return current, Reason.WINDOW_NOT_FULL, because
    too_soon = _backed_off(policy, snapshot, memory)
    if too_soon is not None:
        return current, Reason.BACKED_OFF, f"{words}, but {too_soon}"
    because = f"{words}, below {settings.release_share:.0%} for {settings.release_after:g}s"
    return AdmissionOrder.ARRIVAL, Reason.COVERAGE_RECOVERED, because


def _backed_off(policy: Policy, snapshot: Snapshot, memory: Memory) -> str | None:
    """In words, that another change of the order must wait, because earlier ones disappointed."""
    back_off = policy.rebalance.back_off
    times = pace(memory.admission, back_off) * expectation.doubt(policy, memory, Lever.ADMISSION)
    wait_s = policy.admission.release_after * times
    since_s = memory.admission.since_last_s(snapshot.at_s)
    if times == 1 or since_s >= wait_s:
        return None
    return (
        f"earlier changes of the order served less than expected, and the last was {since_s:.0f}s "
        f"ago, under {wait_s:.0f}s"
    )


def _new_ageing(policy: Policy, memory: Memory) -> tuple[Reason, str]:
    wait_s = natural_wait_s(memory)
    if policy.admission.ageing != "auto" or wait_s is None:
        return Reason.POLICY_VALUE, "the policy sets it"
    return Reason.QUEUE_CHANGED, f"calls wait about {wait_s:.0f}s in order of arrival"


def _held_back(snapshot: Snapshot) -> str:
    """The calls that admission keeps from starting now, as the end of a sentence; may be empty."""
    held = snapshot.requests.held_back
    if not held:
        return ""
    return f"; {held} waiting requests are held by the limit of {snapshot.admission.max_running}"


def _figures(
    policy: Policy, snapshot: Snapshot, memory: Memory, wanted: AdmissionRules
) -> dict[str, float]:
    reach, requests = reach_now(snapshot), snapshot.requests
    figures: dict[str, float] = {
        "live_set_tokens": snapshot.sessions.live_set_tokens,
        "live_sessions": snapshot.sessions.live_sessions,
        "min_reach_tokens": reach.min_tokens,
        "load_ratio": live_load(snapshot, reach),
        "engage_at_ratio": policy.admission.engage_at,
        "release_at_ratio": policy.admission.release_share,
        "waiting_requests": requests.waiting,
        "max_running_requests": wanted.max_running,
        "ageing_seconds": wanted.ageing_s,
        "oldest_share_ratio": wanted.oldest_share,
    }
    optional = {
        "natural_wait_seconds": natural_wait_s(memory),
        "oldest_wait_seconds": requests.oldest_wait_s,
        "held_back_requests": requests.held_back,
        "refused_total_requests": requests.refused_total,
        "max_waiting_sessions": wanted.max_waiting_sessions,
        "max_context_tokens": wanted.max_context_tokens,
    }
    figures.update({name: value for name, value in optional.items() if value is not None})
    return figures | expectation.figures(memory, Lever.ADMISSION)
