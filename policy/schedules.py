"""Values above the document: schedules by time of day, by day or by pressure, and overrides.

A schedule is an entry of the document; an override is a value that an operator sets for a time.
``effective`` applies them to the policy. The daemon keeps the overrides, also when the document
changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from hisparsed.policy.problems import refuse, shown
from hisparsed.policy.schema_types import Section

MAX_ENTRIES: Final = 8
"""Every combination is validated at load, so their number is kept small."""
LOCAL: Final = "local"
_DAY_MINUTES: Final = 24 * 60
_TIME: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|(24):(00)", re.ASCII)

Scalar = bool | int | float | str | None


def _scalar(value: object) -> object:
    if value is not None and not isinstance(value, bool | int | float | str):
        hint = "write one value for each key, keys with dots such as hot.max"
        raise refuse("not_one_value", f"{shown(value)} is not one value", hint=hint)
    return value


SetValue = Annotated[Any, BeforeValidator(_scalar)]
"""A value as written; the key that it is for reads its unit."""


class Pressure(StrEnum):
    """Whether the live set is too large for the smaller reach."""

    LOW = "low"
    HIGH = "high"


class Day(StrEnum):
    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


_DAYS: Final = tuple(Day)


def _minute(value: object) -> int:
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        hint = 'write hours and minutes such as "06:30" or "22:00"'
        raise refuse("time_of_day", f"{shown(value)} is not a time of day", hint=hint)
    hours, minutes = (part for part in match.groups() if part is not None)
    return int(hours) * 60 + int(minutes)


def clock_minute(minute: int | None) -> str | None:
    """Minutes since midnight as "22:00"."""
    return None if minute is None else f"{minute // 60:02}:{minute % 60:02}"


def _known_zone(name: str) -> str:
    if name != LOCAL:
        try:
            ZoneInfo(name)
        except (ValueError, OSError, LookupError):
            hint = "write a name such as Europe/Berlin or UTC, or local for that of the machine"
            message = f"{shown(name)} is not a time zone known to this machine"
            raise refuse("timezone", message, hint=hint) from None
    return name


Minute = Annotated[
    int,
    BeforeValidator(_minute),
    PlainSerializer(clock_minute),
    WithJsonSchema({"type": "string", "pattern": f"^(?:{_TIME.pattern})$"}),
]
"""Minutes since midnight, written as "22:00"."""


class When(Section):
    """Conditions of one entry; all that are given must hold."""

    days: Annotated[tuple[Day, ...], Field(min_length=1)] = _DAYS
    """Days on which the entry is active; a night belongs to the day on which it begins."""
    begin: Annotated[Minute | None, Field(alias="from")] = None
    """Time of day at which it begins; all day if neither ``from`` nor ``to`` is given."""
    end: Annotated[Minute | None, Field(alias="to")] = None
    """Time of day at which it ends; earlier than ``from`` is on the next day."""
    timezone: Annotated[str, AfterValidator(_known_zone)] = LOCAL
    """Name of the time zone of days and times, or ``local``."""
    pressure: Pressure | None = None
    """Active from above ``admission.engage_at`` until below ``release_at`` (high), or otherwise
    (low)."""

    @model_validator(mode="after")
    def _says_when(self) -> When:
        if not self.model_fields_set & {"days", "begin", "end", "pressure"}:
            hint = "add days, from and to, or pressure"
            raise refuse("never_said", "does not say when", hint=hint)
        if (self.begin is None) is not (self.end is None):
            given, missing = ("from", "to") if self.end is None else ("to", "from")
            raise refuse("half_a_time", f"has {given} but no {missing}", hint="give both or none")
        if self.begin is not None and self.begin == self.end:
            hint = "omit both for the whole day"
            raise refuse("no_time", "from and to are the same time", hint=hint, key=("to",))
        if self.begin == _DAY_MINUTES:
            raise refuse("no_begin", "24:00 is the end of a day", hint="write 00:00", key=("from",))
        return self

    def holds(self, unix_s: float, pressure: Pressure) -> bool:
        """Whether it is active; time of day is local wall-clock time."""
        if self.pressure not in (None, pressure):
            return False
        now = _on_the_wall(unix_s, self.timezone)
        minute = now.hour * 60 + now.minute
        today, yesterday = _DAYS[now.weekday()], _DAYS[now.weekday() - 1]
        if self.begin is None or self.end is None:
            return today in self.days
        if self.begin < self.end:
            return today in self.days and self.begin <= minute < self.end
        return (today in self.days and minute >= self.begin) or (
            yesterday in self.days and minute < self.end
        )

    def can_meet(self, other: When) -> bool:
        """Whether both can be active at once; different time zones always can."""
        if self.pressure is not None and other.pressure not in (None, self.pressure):
            return False
        if self.timezone != other.timezone:
            return True
        return any(
            mine[0] < theirs[1] and theirs[0] < mine[1]
            for mine in self._weekly()
            for theirs in other._weekly()
        )

    def _weekly(self) -> Iterator[tuple[int, int]]:
        """Begin and end in minutes of the week; what passes Sunday is wrapped."""
        week = 7 * _DAY_MINUTES
        begin = 0 if self.begin is None else self.begin
        end = _DAY_MINUTES if self.end is None else self.end
        for day in self.days:
            first = _DAYS.index(day) * _DAY_MINUTES
            last = first + end + (_DAY_MINUTES if end <= begin else 0)
            yield first + begin, min(last, week)
            if last > week:
                yield 0, last - week


class Schedule(Section):
    """Other values while a condition holds; where entries overlap, the later one applies."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Name of the entry in status, journal and metrics."""
    when: When
    """Conditions; all that are given must hold."""
    values: Annotated[dict[str, SetValue], Field(alias="set", min_length=1)]
    """Keys with dots (``hot.max``) and the values they have while the entry is active."""


@lru_cache(maxsize=MAX_ENTRIES * 2)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def _on_the_wall(unix_s: float, timezone: str) -> datetime:
    utc = datetime.fromtimestamp(unix_s, UTC)
    return utc.astimezone() if timezone == LOCAL else utc.astimezone(_zone(timezone))


Active = tuple[int, ...]
"""Indices of entries that are active, in order."""


def active_entries(schedules: Sequence[Schedule], unix_s: float, pressure: Pressure) -> Active:
    return tuple(
        index for index, entry in enumerate(schedules) if entry.when.holds(unix_s, pressure)
    )


def combinations(schedules: Sequence[Schedule]) -> Iterator[Active]:
    """Every set of entries that can be active at once, smaller ones first; () is one."""
    found: list[Active] = [()]
    for current in found:
        yield current
        found += [
            (*current, index)
            for index in range(current[-1] + 1 if current else 0, len(schedules))
            if all(schedules[one].when.can_meet(schedules[index].when) for one in current)
        ]


LONGEST_S = 366 * 86_400.0
"""A value for longer is set until unset, or written into the document."""


@dataclass(frozen=True, slots=True)
class Override:
    """``expires_unix_s`` of ``None`` lasts until it is unset."""

    key: str
    value: Scalar
    """As written; units are read with the rest of the document."""
    actor: str
    set_unix_s: float
    expires_unix_s: float | None

    def expired(self, unix_s: float) -> bool:
        return self.expires_unix_s is not None and unix_s >= self.expires_unix_s

    def moved(self, by_s: float) -> Override:
        """The same span after the clock was set by this much."""
        expires = self.expires_unix_s
        return replace(
            self,
            set_unix_s=self.set_unix_s + by_s,
            expires_unix_s=None if expires is None else expires + by_s,
        )
