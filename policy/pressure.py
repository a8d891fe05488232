"""How hard the node is pressed, as one word that schedules go by; with hysteresis. Pure.

The thresholds are those of admission as the document states them, whatever a schedule sets, or
a schedule could switch itself off and on.
"""

from __future__ import annotations

from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.schedules import Pressure
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot


def pressure_now(document: Policy, snapshot: Snapshot, before: Pressure) -> Pressure:
    """High above ``admission.engage_at``, low below ``release_at``, else as before."""
    load = live_load(snapshot, reach_now(snapshot))
    if load > document.admission.engage_at:
        return Pressure.HIGH
    if load < document.admission.release_share:
        return Pressure.LOW
    return before
