"""Calls that stall: reported once, the engine restarts if it may, and a busy one never does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparsed.node.engine.records import RESTARTS_FILE, RestartFile
from hisparsed.node.engine.watchdog import (
    ASK_AFTER_S,
    MOST_COMPILING_S,
    ReportAge,
    StallWatchdog,
)
from hisparsed.policy.events import EventKind
from hisparsed.policy.schema import Policy

WORDS = "2 running and 1 waiting requests have made no progress for 31s"
HOUR_S = 3600.0


@dataclasses.dataclass
class Around:
    """The objects that a stall acts on."""

    folder: Path
    now_s: float = 10 * HOUR_S
    reported_at_s: float = 0.0
    restarts: list[str] = dataclasses.field(default_factory=list)
    events: list[tuple[EventKind, str]] = dataclasses.field(default_factory=list)

    def event(self, kind: EventKind, sentence: str) -> None:
        self.events.append((kind, sentence))

    def stalls(self) -> StallWatchdog:
        recorder: Any = self
        return StallWatchdog(
            recorder,
            RestartFile(self.folder),
            wall_clock=lambda: self.now_s,
            restart=self.restarts.append,
        )

    def outcome(self, stalled: str | None, *, fresh: bool = True, **health: Any) -> Any:
        self.reported_at_s += fresh
        policy = Policy.model_validate({"version": 1, "health": health})
        return SimpleNamespace(reported_at_s=self.reported_at_s, stalled=stalled, policy=policy)

    def kinds(self) -> list[EventKind]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def around(tmp_path: Path) -> Around:
    return Around(tmp_path)


def test_a_standstill_is_told_once_and_so_is_its_end(around: Around) -> None:
    stalls = around.stalls()
    for stalled in (None, WORDS, WORDS, None, None):
        stalls.watch(around.outcome(stalled))
    assert around.kinds() == [EventKind.STALLED, EventKind.STALL_ENDED]
    assert WORDS in around.events[0][1]
    assert around.restarts == [], "the default only alarms"


def test_an_old_report_ends_no_standstill(around: Around) -> None:
    stalls = around.stalls()
    stalls.watch(around.outcome(WORDS))
    stalls.watch(around.outcome(None, fresh=False))
    assert around.kinds() == [EventKind.STALLED]


def test_where_the_policy_says_so_the_engine_is_restarted(around: Around) -> None:
    around.stalls().watch(around.outcome(WORDS, on_stall="restart"))
    assert around.restarts == [WORDS]
    assert "The engine is restarted." in around.events[0][1]
    kept = around.folder / RESTARTS_FILE
    assert json.loads(kept.read_text()) == [around.now_s]
    assert kept.stat().st_mode & 0o777 == 0o640


def test_restarts_are_capped_over_restarts_within_an_hour(around: Around) -> None:
    for _ in range(3):
        around.stalls().watch(around.outcome(WORDS, on_stall="restart", most_restarts=2))
        around.now_s += 60
    assert len(around.restarts) == 2
    assert "2 times within an hour" in around.events[-1][1]
    around.now_s += HOUR_S
    around.stalls().watch(around.outcome(WORDS, on_stall="restart", most_restarts=2))
    assert len(around.restarts) == 3


def test_restarts_from_before_the_clock_was_set_back_count_for_an_hour(around: Around) -> None:
    stalled = around.outcome(WORDS, on_stall="restart", most_restarts=1)
    around.stalls().watch(stalled)
    around.now_s -= 2 * HOUR_S
    around.stalls().watch(stalled)
    assert len(around.restarts) == 1, "the one of two hours ahead counts as of now"
    around.now_s += HOUR_S + 1
    around.stalls().watch(stalled)
    assert len(around.restarts) == 2


def test_a_count_that_cannot_be_kept_restarts_nothing(around: Around) -> None:
    (around.folder / f"{RESTARTS_FILE}.new").mkdir()
    around.stalls().watch(around.outcome(WORDS, on_stall="restart"))
    assert around.restarts == []
    assert "cannot be written" in around.events[0][1]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', '["soon"]'])
def test_a_damaged_count_begins_anew(around: Around, text: str) -> None:
    (around.folder / RESTARTS_FILE).write_text(text)
    around.stalls().watch(around.outcome(WORDS, on_stall="restart"))
    assert around.restarts == [WORDS]


def silent_for(seconds: int, *, compiles_until_s: float) -> float:
    """Seconds that count of an engine that begins with a first step and never reports."""
    age, counted = ReportAge(0.0), 0.0
    for now in range(1, seconds + 1):
        counted = age.since_report_s(float(now), 0.0, lambda now=now: now <= compiles_until_s)
    return counted


def test_time_in_which_a_first_step_compiles_counts_for_no_hang() -> None:
    assert silent_for(400, compiles_until_s=380.0) == pytest.approx(ASK_AFTER_S + 20.0)
    assert silent_for(400, compiles_until_s=0.0) == pytest.approx(400.0)


def test_what_compiles_for_ever_hangs() -> None:
    beyond = int(MOST_COMPILING_S) + 500
    assert silent_for(beyond, compiles_until_s=float(beyond)) == pytest.approx(500.0)


def test_nobody_looks_for_compilers_while_reports_come() -> None:
    age = ReportAge(0.0)
    for now in range(1, 60):
        assert age.since_report_s(float(now), now - 0.5, pytest.fail) <= 1.0
