"""Kinds of events, and the level of each: stable names.

No decision reads them. They stand next to the reason codes because the daemon, its API and the
TUI take both from one place; imports nothing.
"""

from __future__ import annotations

from enum import StrEnum


class EventLevel(StrEnum):
    """From least to most severe; the log uses the same three."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventKind(StrEnum):
    """``level`` is informational where the kind names none."""

    level: EventLevel

    def __new__(cls, value: str, level: EventLevel = EventLevel.INFO) -> EventKind:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.level = level
        return kind

    STARTED = "started"
    POLICY_LOADED = "policy-loaded"
    POLICY_REJECTED = "policy-rejected", EventLevel.WARNING
    VALUE_SET = "value-set"
    VALUE_UNSET = "value-unset"
    VALUE_EXPIRED = "value-expired"
    VALUE_DROPPED = "value-dropped", EventLevel.WARNING
    SCHEDULE_BEGAN = "schedule-began"
    SCHEDULE_ENDED = "schedule-ended"
    PENDING_RESTART = "pending-restart"
    FROZEN = "frozen"
    THAWED = "thawed"
    MODE_SET = "mode-set"
    REPORT_FAILED = "report-failed", EventLevel.WARNING
    REPORT_BACK = "report-back"
    TICK_FAILED = "tick-failed", EventLevel.WARNING
    TASK_FAILED = "task-failed", EventLevel.WARNING
    LEDGER_VIOLATION = "ledger-violation", EventLevel.ERROR
    LEDGER_SOUND = "ledger-sound"
    CANARY_RECORDED = "canary-recorded"
    CANARY_SUSPECT = "canary-suspect", EventLevel.WARNING
    CANARY_MISMATCH = "canary-mismatch", EventLevel.ERROR
    CANARY_FAILED = "canary-failed", EventLevel.WARNING
    CANARY_CLEARED = "canary-cleared"
    KERNELS_PROVED = "kernels-proved"
    KERNELS_FELL_BACK = "kernels-fell-back", EventLevel.WARNING
    OFFLOAD_UNPROVED = "offload-unproved", EventLevel.ERROR
    DOCTOR_FOUND = "doctor-found", EventLevel.WARNING
    DOCTOR_CLEARED = "doctor-cleared"
    CONTROL_SOCKET_LOST = "control-socket-lost", EventLevel.WARNING
    CONTROL_SOCKET_BACK = "control-socket-back", EventLevel.WARNING
    STATE_NOT_KEPT = "state-not-kept", EventLevel.WARNING
    STATE_KEPT = "state-kept"
    JOURNAL_SET_ASIDE = "journal-set-aside", EventLevel.WARNING
    JOURNAL_LOST = "journal-lost", EventLevel.WARNING
    CLOCK_SET = "clock-set", EventLevel.WARNING
    GPU_LOST = "gpu-lost", EventLevel.ERROR
    GPU_BACK = "gpu-back"
    GPU_THROTTLED = "gpu-throttled", EventLevel.WARNING
    GPU_FULL_SPEED = "gpu-full-speed"
    STALLED = "stalled", EventLevel.ERROR
    STALL_ENDED = "stall-ended"
    ENGINE_DIED = "engine-died", EventLevel.ERROR
    ENGINE_RESTARTING = "engine-restarting"
    ENGINE_READY = "engine-ready"
    ENGINE_START_FAILED = "engine-start-failed", EventLevel.WARNING
    ENGINE_QUARANTINED = "engine-quarantined", EventLevel.ERROR
    ENGINE_GONE = "engine-gone", EventLevel.ERROR
    STOPPED = "stopped"


def level_of(kind: object) -> EventLevel:
    """Of a kind by its name; informational where this version does not know the kind."""
    if isinstance(kind, str) and kind in _KINDS:
        return EventKind(kind).level
    return EventLevel.INFO


_KINDS = frozenset(EventKind)
