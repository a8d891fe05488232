"""Guards that hold a lever, shared by the levers: pure tests on past moves and on the signals.

``calm`` holds a move that comes too soon after earlier ones. The others distinguish a shortage of
KV memory from similar states: a stall, calls that a limit holds, a step filled by prefill and a
node without traffic all make calls wait, and moving memory helps none of them. A guard answers with
the reason to hold, or ``None``. Floors, ceilings and dead bands are not here: they depend on what a
lever moves.
"""

from __future__ import annotations

from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Direction, Memory, MoveHistory, free_share
from hisparsed.policy.schema import Policy
from hisparsed.policy.schema_levers import BackOff
from hisparsed.policy.signals import Snapshot
from hisparsed.policy.units import counted


def pace(history: MoveHistory, back_off: BackOff) -> float:
    """How many times longer a saving waits, because earlier savings were undone."""
    # The exponent is bounded first: a large one would overflow.
    exponent = min(history.undone, 64)
    return float(min(back_off.factor**exponent, back_off.limit))


def calm(
    history: MoveHistory,
    direction: Direction,
    at_s: float,
    *,
    cool_down_s: float,
    hold_off_s: float,
    back_off: BackOff,
) -> Reason | None:
    """Why a move in ``direction`` must still wait.

    Hold-off and back-off apply to savings only: blocks that were just given for safety are not
    taken back, but more are never refused.
    """
    elapsed_s = history.since_last_s(at_s)
    if elapsed_s < cool_down_s:
        return Reason.COOLING_DOWN
    if direction is Direction.SAFETY:
        return None
    if history.since_safety_s(at_s) < hold_off_s:
        return Reason.HOLD_OFF
    if elapsed_s < cool_down_s * pace(history, back_off):
        return Reason.BACKED_OFF
    return None


Held = tuple[Reason, str]
"""A holding code, and a clause that follows "because"."""


def stalled(policy: Policy, snapshot: Snapshot, memory: Memory) -> str | None:
    """The words for a stall (calls wait, memory is free, nothing was computed); else ``None``."""
    since_s = memory.signals.no_progress_since_s
    requests = snapshot.requests
    if since_s is None or not (requests.running or requests.waiting):
        return None
    still_s = snapshot.at_s - since_s
    if still_s < policy.stall_after or _short_of_memory(policy, snapshot):
        return None
    return (
        f"{requests.running} running and {requests.waiting} waiting requests have made no "
        f"progress for {still_s:.0f}s, though {free_share(snapshot):.0%} of GPU blocks and "
        f"{_idle_host_blocks(snapshot)} host blocks are free; they do not lack memory"
    )


def without_traffic(snapshot: Snapshot, memory: Memory) -> str | None:
    """The words for no traffic (nothing runs, waits or ran in the split's window); else
    ``None``."""
    requests = snapshot.requests
    if requests.running or requests.waiting or memory.signals.split_tokens_total.rise:
        return None
    return "no request runs, waits or ran in the window"


def wait_is_no_shortage(policy: Policy, snapshot: Snapshot, memory: Memory) -> Held | None:
    """Why waiting calls do not wait for GPU blocks; ``None`` when they do, or none waits."""
    requests, share = snapshot.requests, free_share(snapshot)
    if not requests.waiting:
        return None
    limit = snapshot.admission.max_running
    if requests.running >= limit:
        because = f"{_waiting(snapshot)} for the limit of {limit} running requests"
        return Reason.NOT_KV_PRESSURE, because
    busy = core_busy(snapshot)
    if busy is not None and busy >= policy.hot.core_bound_at:
        because = (
            f"the engine core computes schedules for {busy:.0%} of the time, so "
            f"{_waiting(snapshot)} for steps, not for blocks"
        )
        return Reason.ENGINE_CORE_BOUND, because
    filled = step_fill(snapshot, memory)
    if filled is not None and filled >= policy.hot.prefill_bound_at:
        because = (
            f"prefill fills {filled:.0%} of what a step may compute, so waiting requests wait "
            "for computation, not for blocks"
        )
        return Reason.PREFILL_BOUND, because
    need = snapshot.gpu.head_need_blocks
    enough = share >= policy.hot.free_high if need is None else need <= snapshot.gpu.free_blocks
    if enough:
        because = (
            f"{_waiting(snapshot)} while {share:.0%} of GPU blocks are free; something else blocks "
            f"{'it' if requests.waiting == 1 else 'them'}"
        )
        return Reason.NOT_KV_PRESSURE, because
    return None


def _waiting(snapshot: Snapshot) -> str:
    count = snapshot.requests.waiting
    return f"{counted(count, 'request')} wait{'s' if count == 1 else ''}"


def core_busy(snapshot: Snapshot) -> float | None:
    """Share of the last minute that the engine core computed schedules for; ``None`` if unknown."""
    return None if snapshot.step_cpu is None else snapshot.step_cpu.busy_ratio


def step_fill(snapshot: Snapshot, memory: Memory) -> float | None:
    """Computed tokens as a share of what the steps of the shrink window could have computed.

    ``None`` where steps or their limit are not known, or no step was made.
    """
    most, steps = snapshot.geometry.max_step_tokens, memory.signals.shrink_steps_total.rise
    if most is None or not steps:
        return None
    return memory.signals.shrink_scheduled_total.rise / (steps * most)


def _idle_host_blocks(snapshot: Snapshot) -> int:
    return max(0, snapshot.hisparse.capacity_blocks - snapshot.hisparse.in_use_blocks)


def _short_of_memory(policy: Policy, snapshot: Snapshot) -> bool:
    need = snapshot.gpu.head_need_blocks
    gpu_short = free_share(snapshot) < policy.hot.free_low
    if need is not None:
        gpu_short = snapshot.gpu.free_blocks < need
    return gpu_short or _idle_host_blocks(snapshot) < snapshot.head_need_blocks
