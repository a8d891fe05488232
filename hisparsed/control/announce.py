"""Events beside the ticks: one call puts them in the journal, the event stream and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hisparsed.control.broadcast import Broadcast, Message
from hisparsed.control.journal import Journal
from hisparsed.control.records import EventKind, EventRecord, view_event
from hisparsed.policy.problems import printable

log = logging.getLogger("hisparsed.control")

DAEMON = "daemon"
_WARN = frozenset(
    {
        EventKind.POLICY_REJECTED,
        EventKind.VALUE_DROPPED,
        EventKind.REPORT_FAILED,
        EventKind.TICK_FAILED,
        EventKind.TASK_FAILED,
        EventKind.CANARY_FAILED,
        EventKind.CONTROL_SOCKET_LOST,
        EventKind.CONTROL_SOCKET_BACK,
        EventKind.ENGINE_START_FAILED,
        EventKind.DOCTOR_FOUND,
        EventKind.STATE_NOT_KEPT,
        EventKind.JOURNAL_SET_ASIDE,
        EventKind.CLOCK_SET,
        EventKind.GPU_THROTTLED,
    }
)
_ERROR = frozenset(
    {
        EventKind.ENGINE_DIED,
        EventKind.ENGINE_GONE,
        EventKind.ENGINE_QUARANTINED,
        EventKind.LEDGER_VIOLATION,
        EventKind.CANARY_MISMATCH,
        EventKind.STALLED,
        EventKind.GPU_LOST,
    }
)


class Announcer:
    """``wall_clock`` is Unix seconds."""

    def __init__(
        self, journal: Journal, broadcast: Broadcast, *, wall_clock: Callable[[], float]
    ) -> None:
        self._journal = journal
        self._broadcast = broadcast
        self._wall_clock = wall_clock

    def event(self, kind: EventKind, sentence: str, *, actor: str = DAEMON) -> None:
        """``sentence`` is for people; several lines are allowed."""
        sentence, actor = printable(sentence), printable(actor)
        record = EventRecord(
            self._journal.next_sequence(), self._wall_clock(), kind, actor, sentence
        )
        self._journal.record(record)
        self._broadcast.send(Message("event", view_event(record).model_dump_json()))
        log.log(level_of(kind), "%s", sentence, extra={"event_id": kind.value, "actor": actor})


def level_of(kind: EventKind) -> int:
    """As in ``logging``."""
    if kind in _ERROR:
        return logging.ERROR
    return logging.WARNING if kind in _WARN else logging.INFO
