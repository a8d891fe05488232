"""Guards that keep a lever calm, shared by the levers: pure tests on past moves.

A guard answers with the reason to hold, or ``None``. Floors, ceilings and dead bands are
not here: they depend on what a lever moves.
"""

from __future__ import annotations

from hisparsed.policy.memory import Direction, MoveHistory
from hisparsed.policy.reasons import Reason
from hisparsed.policy.schema_levers import BackOff


def pace(history: MoveHistory, back_off: BackOff) -> float:
    """How many times longer thrift waits, because earlier thrift was undone."""
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

    Hold-off and back-off bind thrift only: what was just given for safety is not taken
    back, but more of it is never refused.
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
