"""When schedule entries are active: nights, week-ends, clock changes, pressure, overlaps."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from hisparsed.policy.schedules import (
    Pressure,
    Schedule,
    When,
    active_entries,
    combinations,
)

BERLIN = "Europe/Berlin"


def when(**conditions: Any) -> When:
    return When.model_validate({"timezone": BERLIN, **conditions})


def entry(name: str = "one", **conditions: Any) -> Schedule:
    given = {"timezone": "UTC", **conditions}
    return Schedule.model_validate({"name": name, "when": given, "set": {"tick": "2s"}})


def at(text: str, timezone: str = BERLIN, fold: int = 0) -> float:
    moment = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(timezone), fold=fold)
    return moment.timestamp()


NIGHT = {"days": ["mon", "fri"], "from": "22:00", "to": "06:00"}


@pytest.mark.parametrize(
    ("moment", "active"),
    [
        ("2026-03-02T21:59:59", False),  # a Monday
        ("2026-03-02T22:00:00", True),
        ("2026-03-03T00:00:00", True),
        ("2026-03-03T05:59:59", True),
        ("2026-03-03T06:00:00", False),
        ("2026-03-03T22:30:00", False),  # Tuesday's own night is not meant
        ("2026-03-02T05:00:00", False),  # the night of Sunday
        ("2026-03-07T03:00:00", True),  # Saturday, the night of Friday
    ],
)
def test_a_night_belongs_to_the_day_on_which_it_begins(moment: str, active: bool) -> None:
    assert when(**NIGHT).holds(at(moment), Pressure.LOW) is active


@pytest.mark.parametrize(
    ("moment", "active"),
    [
        ("2026-03-07T00:00:00", True),
        ("2026-03-08T23:59:59", True),
        ("2026-03-09T00:00:00", False),
        ("2026-03-06T23:59:59", False),
    ],
)
def test_days_alone_are_whole_days(moment: str, active: bool) -> None:
    assert when(days=["sat", "sun"]).holds(at(moment), Pressure.LOW) is active


def test_a_time_can_end_at_midnight() -> None:
    evening = when(**{"from": "20:00", "to": "24:00"})
    assert evening.holds(at("2026-03-02T23:59:59"), Pressure.LOW)
    assert not evening.holds(at("2026-03-03T00:00:00"), Pressure.LOW)


def test_an_hour_that_summer_time_skips_never_comes() -> None:
    skipped = when(**{"from": "02:00", "to": "03:00"})
    begin = at("2026-03-29T00:00:00")
    assert not any(skipped.holds(begin + 60 * minute, Pressure.LOW) for minute in range(23 * 60))


def test_an_hour_that_the_end_of_summer_time_repeats_counts_twice() -> None:
    repeated = when(**{"from": "02:00", "to": "03:00"})
    begin = at("2026-10-25T00:00:00")
    minutes = [repeated.holds(begin + 60 * minute, Pressure.LOW) for minute in range(25 * 60)]
    assert sum(minutes) == 120
    assert sum(before != after for before, after in pairwise(minutes)) == 2


def test_a_night_over_a_clock_change_begins_and_ends_by_the_wall() -> None:
    night = when(**{"from": "22:00", "to": "06:00"})
    for day, hours in (("2026-03-28", 7), ("2026-10-24", 9), ("2026-03-02", 8)):
        begin = at(f"{day}T22:00:00")
        assert not night.holds(begin - 1, Pressure.LOW)
        assert night.holds(begin, Pressure.LOW)
        assert night.holds(begin + hours * 3600 - 1, Pressure.LOW)
        assert not night.holds(begin + hours * 3600, Pressure.LOW)


def test_the_time_zone_decides() -> None:
    moment = at("2026-07-01T23:00:00", "UTC")
    late = {"from": "22:00", "to": "24:00"}
    assert When.model_validate({"timezone": "UTC", **late}).holds(moment, Pressure.LOW)
    assert not when(**late).holds(moment, Pressure.LOW)


def test_local_is_the_zone_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        noon = When.model_validate({"from": "12:00", "to": "13:00"})
        assert noon.holds(at("2026-07-01T12:30:00", "America/New_York"), Pressure.LOW)
        assert not noon.holds(at("2026-07-01T12:30:00", BERLIN), Pressure.LOW)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_pressure_and_time_must_both_hold() -> None:
    both = when(pressure="high", **{"from": "08:00", "to": "18:00"})
    noon, night = at("2026-03-02T12:00:00"), at("2026-03-02T20:00:00")
    assert both.holds(noon, Pressure.HIGH)
    assert not both.holds(noon, Pressure.LOW)
    assert not both.holds(night, Pressure.HIGH)


def test_active_entries_keep_the_order_of_the_document() -> None:
    entries = [
        entry(days=["mon"]),
        entry(pressure="high"),
        entry(days=["tue"]),
        entry(pressure="low"),
    ]
    monday = at("2026-03-02T12:00:00", "UTC")
    assert active_entries(entries, monday, Pressure.HIGH) == (0, 1)
    assert active_entries(entries, monday, Pressure.LOW) == (0, 3)


def test_combinations_are_those_that_can_meet() -> None:
    entries = [
        entry(pressure="high"),
        entry(pressure="low"),
        entry(**{"from": "22:00", "to": "06:00"}),
        entry(**{"from": "06:00", "to": "22:00"}),
    ]
    found = list(combinations(entries))
    assert found == [(), (0,), (1,), (2,), (3,), (0, 2), (0, 3), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        ({"days": ["mon"]}, {"days": ["tue"]}, False),
        ({"days": ["sun"], "from": "23:00", "to": "01:00"}, {"days": ["mon"]}, True),
        ({"days": ["sat"], "from": "23:00", "to": "01:00"}, {"days": ["mon"]}, False),
        ({"from": "08:00", "to": "12:00"}, {"from": "12:00", "to": "13:00"}, False),
        ({"from": "08:00", "to": "12:01"}, {"from": "12:00", "to": "13:00"}, True),
        ({"days": ["mon"]}, {"days": ["tue"], "timezone": "Asia/Tokyo"}, True),
    ],
)
def test_entries_meet_when_their_times_overlap(first: Any, second: Any, meet: bool) -> None:
    one, other = entry(**first).when, entry(**second).when
    assert one.can_meet(other) is meet
    assert other.can_meet(one) is meet


def test_every_moment_of_a_week_is_one_of_the_combinations() -> None:
    entries = [
        entry(days=["mon", "sun"]),
        entry(**{"days": ["sun"], "from": "20:00", "to": "03:00"}),
        entry(**{"from": "12:00", "to": "13:00", "timezone": "Asia/Kolkata"}),
        entry(pressure="high"),
    ]
    possible = set(combinations(entries))
    begin = at("2026-03-02T00:00:00", "UTC")
    seen = {
        active_entries(entries, begin + 600 * step, pressure)
        for step in range(7 * 24 * 6)
        for pressure in Pressure
    }
    assert seen <= possible
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({}, "does not say when"),
        ({"timezone": "UTC"}, "does not say when"),
        ({"from": "22:00"}, "has from but no to"),
        ({"to": "22:00"}, "has to but no from"),
        ({"from": "22:00", "to": "22:00"}, "from and to are the same time"),
        ({"from": "24:00", "to": "06:00"}, "24:00 is the end of a day"),
        ({"from": "9:00", "to": "10:00"}, "is not a time of day"),
        ({"from": "23:60", "to": "10:00"}, "is not a time of day"),
        ({"from": 1320, "to": "10:00"}, "is not a time of day"),
        ({"days": []}, "at least 1"),
        ({"days": ["monday"]}, "mon"),
        ({"days": ["mon"], "timezone": "Berlin"}, "is not a time zone"),
        ({"days": ["mon"], "timezone": "../etc/passwd"}, "is not a time zone"),
        ({"pressure": "medium"}, "low"),
        ({"at": "22:00"}, "Extra inputs"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused(conditions: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        When.model_validate(conditions)
