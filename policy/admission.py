"""Admission: in which order calls start, and how many new sessions may wait.

While the live set fits, vLLM's order is best. When it nears the smaller reach, calls whose
prefix is still held start first (with ageing) and new sessions are limited. Decides only;
the engine keeps the order and the API answers 429.
"""

from __future__ import annotations

from hisparsed.policy.decisions import Proposal
from hisparsed.policy.memory import Memory
from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, AdmissionOrder, Snapshot


def propose_admission(
    policy: Policy, snapshot: Snapshot, memory: Memory
) -> tuple[Proposal, Admission]:
    """The proposal, and order with limits as they should be in force."""
    order, reason, because = _order(policy, snapshot, memory)
    wanted = admission_for(policy, snapshot.geometry.max_num_seqs, order)
    current = snapshot.admission
    if order is current.order and wanted != current:
        reason, because = Reason.POLICY_VALUE, "the policy's limits differ from those in force"
    if wanted == current:
        action = f"keep the {current.order} order"
    elif order is current.order:
        action = f"put the policy's limits in force, keeping the {order} order"
    else:
        action = f"start calls in {order} instead of {current.order} order"
    reach = reach_now(snapshot)
    figures = {
        "live_set_tokens": snapshot.sessions.live_set_tokens,
        "live_sessions": snapshot.sessions.live_sessions,
        "min_reach_tokens": reach.min_tokens,
        "load_ratio": live_load(snapshot, reach),
        "engage_at_ratio": policy.admission.engage_at,
        "release_at_ratio": policy.admission.release_at,
        "max_running_requests": wanted.max_running,
        "ageing_seconds": wanted.ageing_s,
    }
    if wanted.max_waiting_sessions is not None:
        figures["max_waiting_sessions"] = wanted.max_waiting_sessions
    proposal = Proposal(
        Lever.ADMISSION, current.order.value, order.value, reason, None, figures, action, because
    )
    return proposal, wanted


def admission_for(policy: Policy, max_num_seqs: int, order: AdmissionOrder) -> Admission:
    """Order and limits together: new sessions are only limited while coverage is low."""
    settings = policy.admission
    low_coverage = order is AdmissionOrder.HELD_PREFIX_FIRST
    return Admission(
        order=order,
        ageing_s=settings.ageing,
        max_running=min(max_num_seqs, settings.max_running or max_num_seqs),
        max_waiting_sessions=settings.max_waiting_sessions if low_coverage else None,
        retry_after_s=settings.retry_after,
    )


def start_order(policy: Policy) -> AdmissionOrder:
    """The order to begin with: the policy's own, else that of arrival."""
    if policy.admission.order == "auto":
        return AdmissionOrder.ARRIVAL
    return AdmissionOrder(policy.admission.order)


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
    engaged = current is AdmissionOrder.HELD_PREFIX_FIRST
    if load > settings.engage_at:
        wanted = AdmissionOrder.HELD_PREFIX_FIRST
        reason = Reason.AT_TARGET if engaged else Reason.COVERAGE_LOW
        return wanted, reason, f"{words}, above {settings.engage_at:.0%}"
    if not engaged and not snapshot.sessions.live_sessions:
        return current, Reason.NOT_KV_PRESSURE, "no session is live"
    if load >= settings.release_at:
        return current, Reason.IN_DEAD_BAND, f"{words}, between release and engage"
    if not engaged:
        return current, Reason.NO_BENEFIT, f"{words}, so it fits"
    window = memory.signals.release_load
    if not window.full(settings.release_after) or window.high >= settings.release_at:
        because = f"{words}, but was not for all of {settings.release_after:g}s"
        return current, Reason.WINDOW_NOT_FULL, because
    because = f"{words}, below {settings.release_at:.0%} for {settings.release_after:g}s"
    return AdmissionOrder.ARRIVAL, Reason.COVERAGE_RECOVERED, because
