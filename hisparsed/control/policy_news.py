"""What happened to the policy, as events that people read: set, expired, dropped, scheduled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hisparsed.control.announce import DAEMON, Announcer
from hisparsed.control.override_file import OverrideFile, OverrideFileError
from hisparsed.control.policy_source import Advance, Dropped, PolicySource
from hisparsed.control.records import EventKind
from hisparsed.control.status_text import value_text
from hisparsed.policy.units import format_duration


def announce_dropped(announcer: Announcer, dropped: Iterable[Dropped]) -> None:
    """Each override that the policy no longer allows, with the reason."""
    for one in dropped:
        override = one.override
        announcer.event(
            EventKind.VALUE_DROPPED,
            f"Dropped {override.key} = {value_text(override.value)}, set by {override.actor}: "
            f"it is no longer valid. {one.why}",
        )


def restore_overrides(source: PolicySource, announcer: Announcer, folder: Path) -> None:
    """Take up what operators had set before a restart; what cannot be is announced."""
    try:
        announce_dropped(announcer, source.restore(OverrideFile(folder)))
    except OverrideFileError as error:
        announcer.event(EventKind.VALUE_DROPPED, f"What operators had set is lost: {error}.")


def announce_advance(announcer: Announcer, advance: Advance) -> None:
    if advance.clock_set_s:
        way = "forward" if advance.clock_set_s > 0 else "back"
        by = format_duration(float(round(abs(advance.clock_set_s))))
        announcer.event(
            EventKind.CLOCK_SET,
            f"The machine's clock was set {way} by {by}. Schedules go by the new time; values that "
            "were set for a time last as long as was asked for.",
        )
    for override in advance.expired:
        announcer.event(
            EventKind.VALUE_EXPIRED,
            f"The time of {override.key} = {value_text(override.value)}, set by {override.actor}, "
            "is over; what the policy says counts again.",
        )
    announce_dropped(announcer, advance.dropped)
    for kind, names, words in (
        (EventKind.SCHEDULE_ENDED, advance.ended, "ended"),
        (EventKind.SCHEDULE_BEGAN, advance.began, "began"),
    ):
        for name in names:
            announcer.event(kind, f'The schedule "{name}" {words}.', actor=DAEMON)
