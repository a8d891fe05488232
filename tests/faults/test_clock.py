"""A clock that is set by hours, a machine that slept: nothing twice or never, all in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from control_node import POLICY
from state_node import StateNode

from hisparsed.canary.round import Trigger
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.records import EventRecord
from hisparsed.control.journal.store import Query, Retention
from hisparsed.control.live_policy import ClockJump, PolicySource
from hisparsed.control.state_files import OverrideFile
from hisparsed.control.status.history import COARSE_S, FINE_SPAN_S, History
from hisparsed.node.engine.records import RestartFile
from hisparsed.node.engine.watchdog import ReportAge, StallWatchdog
from hisparsed.policy.decisions import Reason
from hisparsed.policy.events import EventKind

HOUR_S = 3_600.0
JUMPS = pytest.mark.parametrize("jump_s", [-5 * HOUR_S, -60.0, 60.0, 5 * HOUR_S, 366 * 24 * HOUR_S])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StateNode]:
    (tmp_path / "state").mkdir()
    node = StateNode(tmp_path, tmp_path / "state")
    yield node
    node.close_journal()


def with_schedule(tmp_path: Path, begin: str, end: str) -> StateNode:
    """An entry of an hour or so. The clock of these tests shows 22:15:00 UTC of some day."""
    (tmp_path / "state").mkdir()
    entry = f"{{from: '{begin}', to: '{end}', timezone: UTC}}"
    schedules = f"schedules:\n  - {{name: night, when: {entry}, set: {{hot.max: 3}}}}\n"
    return StateNode(tmp_path, tmp_path / "state", POLICY + schedules)


# --- seeing it ----------------------------------------------------------------------


class Clocks:
    def __init__(self) -> None:
        self.monotonic_s, self.set_by_s, self.read_takes_s = 50.0, 0.0, 0.0

    def monotonic(self) -> float:
        return self.monotonic_s

    def wall(self) -> float:
        self.monotonic_s += self.read_takes_s
        return 1_700_000_000.0 + self.monotonic_s + self.set_by_s


@JUMPS
def test_a_clock_that_was_set_is_seen_once(jump_s: float) -> None:
    clocks = Clocks()
    jump = ClockJump(clocks.monotonic, clocks.wall)
    clocks.monotonic_s += 1
    assert jump.since_last_s() == 0
    clocks.set_by_s += jump_s
    assert jump.since_last_s() == pytest.approx(jump_s)
    assert jump.since_last_s() == 0


def test_a_clock_that_is_corrected_slowly_was_not_set() -> None:
    clocks = Clocks()
    jump = ClockJump(clocks.monotonic, clocks.wall)
    for _ in range(1_000):
        clocks.set_by_s += 0.1
        assert jump.since_last_s() == 0


def test_a_process_that_was_stopped_between_two_clocks_saw_nothing() -> None:
    clocks = Clocks()
    jump = ClockJump(clocks.monotonic, clocks.wall)
    clocks.read_takes_s = HOUR_S
    assert jump.since_last_s() == 0
    clocks.read_takes_s = 0
    assert jump.since_last_s() == 0


@JUMPS
async def test_the_operator_is_told_once_and_by_how_much(node: StateNode, jump_s: float) -> None:
    await node.loop.start()
    await node.ticks(3)
    node.clock.set_by_s += jump_s
    await node.ticks(3)
    (told,) = node.sentences("clock-set")
    assert ("forward" if jump_s > 0 else "back") in told


# --- schedules and values for a time ------------------------------------------------


@JUMPS
async def test_a_value_for_a_time_lasts_as_long_as_was_asked(
    node: StateNode, jump_s: float
) -> None:
    await node.loop.start()
    node.set_value("hot.max", 3, for_s=10.0)
    await node.ticks(4)
    node.clock.set_by_s += jump_s
    await node.ticks(5)
    assert node.source.in_force.policy.hot.max == 3.0
    (override,) = node.source.overrides
    left_s = (override.expires_unix_s or 0) - node.clock.wall()
    assert left_s == pytest.approx(1.0), "what the status shows goes on too"
    assert OverrideFile(node.state).load() == node.source.overrides
    await node.ticks(5)
    assert node.source.overrides == ()
    assert node.kinds().count("value-expired") == 1


async def test_a_clock_set_back_while_the_daemon_was_down_makes_no_value_last_longer(
    node: StateNode,
) -> None:
    node.set_value("hot.max", 3, for_s=60.0)
    node.clock.set_by_s -= 5 * HOUR_S
    clock = node.clock
    again = PolicySource(node.policy_path, clock=clock.monotonic, wall_clock=clock.wall)
    again.restore(OverrideFile(node.state))
    assert [one.key for one in again.overrides] == ["hot.max"]
    clock.now_s += 61
    assert len(again.advance().expired) == 1


async def test_a_jump_over_the_begin_of_a_schedule_begins_it_once(tmp_path: Path) -> None:
    node = with_schedule(tmp_path, "23:00", "04:00")
    await node.loop.start()
    await node.ticks(2)
    node.clock.set_by_s += HOUR_S
    await node.ticks(5)
    assert node.source.in_force.policy.hot.max == 3.0
    assert node.kinds().count("schedule-began") == 1
    node.clock.set_by_s -= HOUR_S
    await node.ticks(5)
    assert node.source.in_force.policy.hot.max == "auto"
    assert node.kinds().count("schedule-ended") == 1


async def test_a_jump_over_the_whole_of_a_schedule_leaves_it_out(tmp_path: Path) -> None:
    node = with_schedule(tmp_path, "23:00", "23:30")
    await node.loop.start()
    await node.ticks(2)
    node.clock.set_by_s += 5 * HOUR_S
    await node.ticks(5)
    assert not {"schedule-began", "schedule-ended"} & set(node.kinds())


async def test_a_schedule_that_begins_as_a_value_ends_is_told(tmp_path: Path) -> None:
    node = with_schedule(tmp_path, "22:16", "23:00")
    await node.loop.start()
    node.set_value("hot.step", 1, for_s=59.5)
    node.clock.now_s += 60
    await node.ticks(2)
    assert node.kinds()[-2:] == ["value-expired", "schedule-began"]
    assert node.kinds().count("schedule-began") == 1


async def test_a_schedule_that_begins_as_somebody_sets_a_value_is_told(tmp_path: Path) -> None:
    node = with_schedule(tmp_path, "22:16", "23:00")
    await node.loop.start()
    node.clock.now_s += 60
    node.set_value("hot.step", 1)
    await node.ticks(2)
    assert node.kinds().count("schedule-began") == 1


# --- what goes by the monotonic clock -----------------------------------------------


@JUMPS
async def test_cool_downs_and_windows_do_not_notice(tmp_path: Path, jump_s: float) -> None:
    policy = POLICY
    for short, long in (("down: 2s", "down: 6s"), ("y: 1s", "y: 5s"), (": 5%", ": 2%")):
        policy = policy.replace(short, long)
    policy = policy.replace("step_towards_safety: 10%", "step_towards_safety: 2%")
    found = []
    for place, by_s in (("still", 0.0), ("set", jump_s)):
        (tmp_path / place / "state").mkdir(parents=True)
        node = StateNode(tmp_path / place, tmp_path / place / "state", policy)
        await node.loop.start()
        node.engine.target = 10
        for tick in range(12):
            node.clock.set_by_s += by_s if tick in (4, 7) else 0
            await node.ticks(1)
        found.append([[one.reason for one in tick.decision.levers] for tick in node.journal.ticks])
    assert found[0] == found[1]
    assert any(Reason.COOLING_DOWN in reasons for reasons in found[0])


@JUMPS
async def test_the_canary_asks_by_its_period_whatever_the_clock_shows(
    tmp_path: Path, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    policy = f"{POLICY}canary: {{every: 1m, least_gap: 10s, most_waiting: 9}}\n"
    node = StateNode(tmp_path, tmp_path / "state", policy)
    asked_s: list[float] = []

    async def run(watch: CanaryWatch, trigger: Trigger) -> None:
        asked_s.append(node.clock.now_s)
        watch._schedule.ran(node.clock.now_s)

    monkeypatch.setattr(CanaryWatch, "run", run)
    unused: Any = None
    watch = CanaryWatch(
        unused,
        node.holds,
        node.recorder,
        node.journal,
        node.state,
        clock=node.clock.monotonic,
        wall_clock=node.clock.wall,
    )
    node.on_tick.append(watch.watch)
    await node.loop.start()
    for second in range(181):
        node.clock.set_by_s += jump_s if second in (30, 90) else 0
        await node.loop.tick()
        await asyncio.sleep(0)
        node.clock.now_s += 1
    begin_s = asked_s[0]
    assert [round(at_s - begin_s) for at_s in asked_s] == [0, 60, 120, 180]


@pytest.mark.parametrize("paused_s", [90.5, HOUR_S + 0.5])
async def test_a_machine_that_slept_ticks_once_and_goes_on(
    node: StateNode, paused_s: float
) -> None:
    """Whether the monotonic clock counts sleep depends on the machine; here it does."""
    await node.loop.start()
    at_s: list[float] = []

    def after() -> None:
        at_s.append(node.clock.now_s)
        if len(at_s) == 3:
            node.clock.now_s += paused_s
        if len(at_s) == 10:
            raise asyncio.CancelledError

    node.clock.after_sleep = after
    with pytest.raises(asyncio.CancelledError):
        await node.loop.run()
    times = [tick.snapshot.at_s for tick in node.journal.ticks]
    assert len(times) == 10
    gaps_s = [after - before for before, after in pairwise(times)]
    assert gaps_s == [1, 1, 1 + paused_s, 0.5, *(1,) * 5], "back to whole seconds at once"
    assert all(0 < slept <= 1 for slept in node.clock.slept)
    assert node.current.unready() is None, "the report of the tick after is new"
    assert "report-failed" not in node.kinds()


LOOK_S = 0.2


@pytest.mark.parametrize("paused_s", [90.0, HOUR_S])
def test_an_engine_is_not_killed_for_a_pause_of_the_whole_machine(paused_s: float) -> None:
    age, now_s = ReportAge(100.0), 100.0
    for _ in range(20):
        now_s += LOOK_S
        age.since_report_s(now_s, 103.0)
    now_s += paused_s
    assert age.since_report_s(now_s, 103.0) < 5
    now_s += LOOK_S
    assert age.since_report_s(now_s, now_s) == 0, "the tick after brings a new report"


def test_an_engine_that_says_nothing_is_found_in_time_while_the_daemon_listens() -> None:
    age, now_s, age_s = ReportAge(100.0), 100.0, 0.0
    while age_s <= 120:
        now_s += LOOK_S
        age_s = age.since_report_s(now_s, 100.0)
    assert now_s - 100 == pytest.approx(120, abs=2 * LOOK_S)


def test_a_clock_set_back_neither_forgets_nor_prolongs_the_cap_on_restarts(
    node: StateNode,
) -> None:
    restarts = RestartFile(node.state)
    stalls = StallWatchdog(
        node.recorder, restarts, wall_clock=node.clock.wall, restart=lambda _why: None
    )
    restarts.save([node.clock.wall() - 100, node.clock.wall() - 50])
    node.clock.set_by_s -= 5 * HOUR_S
    assert not stalls._may_restart(2)[0], "two within the hour are all that is allowed"
    node.clock.now_s += HOUR_S + 1
    assert stalls._may_restart(2)[0], "and an hour later they no longer count"


RECORD_JUMPS = pytest.mark.parametrize("jump_s", [-5 * HOUR_S, -60.0, 60.0, 5 * HOUR_S])


@RECORD_JUMPS
async def test_the_journal_keeps_the_order_of_events(node: StateNode, jump_s: float) -> None:
    await node.loop.start()
    await node.cycles(3)
    node.clock.set_by_s += jump_s
    await node.cycles(3)
    empty = Journal(node.journal._writer, run="another")
    for journal in (node.journal, empty):
        views = await journal.decisions(Query(limit=1_000))
        sequences = [view.sequence for view in views]
        assert sequences == sorted(sequences, reverse=True)
        assert len(set(sequences)) == 6


async def test_explain_since_shows_what_was_just_decided_whatever_the_jump(
    node: StateNode,
) -> None:
    for jump_s in (0.0, 5 * HOUR_S, -9 * HOUR_S):
        node.clock.set_by_s += jump_s
        if not node.journal.ticks:
            await node.loop.start()
        await node.cycles(2)
        last = node.journal.ticks[-2:]
        since = Query(limit=1_000, since_unix_s=node.clock.wall() - 10)
        shown = {view.sequence for view in await node.journal.decisions(since)}
        assert shown >= {tick.sequence for tick in last}


def test_retention_goes_by_order_so_no_event_of_now_is_dropped(tmp_path: Path) -> None:
    """The kept ticks are from a future that the clock showed before it was put right."""
    node = StateNode(tmp_path, tmp_path / "state")
    writer = JournalWriter(
        node.state,
        run="run-1",
        clock=node.clock.monotonic,
        stamp=str,
        log=lambda _: None,
        retention=Retention(max_ticks=20),
    )

    def event() -> EventRecord:
        number = node.journal.next_sequence()
        return EventRecord(number, node.clock.wall(), EventKind.FROZEN, "ann", f"event {number}")

    async def ticks(count: int) -> None:
        await node.loop.start()
        for _ in range(count):
            await node.ticks(1)
            writer.write([event(), node.journal.ticks[-1]])

    node.clock.set_by_s = 900 * 24 * HOUR_S
    asyncio.run(ticks(49))
    node.clock.set_by_s = 0
    last = event()
    writer.write([last])  # the fiftieth write
    asyncio.run(ticks(1))  # and the one that looks at what to keep
    empty = Journal(writer, run="another")
    events = asyncio.run(empty.events(1_000))
    assert last.sentence in [one.sentence for one in events]
    assert len(events) < 49, "older ones went with their ticks"
    writer.close()


@RECORD_JUMPS
async def test_the_history_stays_in_order_and_keeps_its_ages(
    node: StateNode, jump_s: float
) -> None:
    history = History()
    node.on_tick.append(history.watch)
    await node.loop.start()
    begin_s = node.clock.now_s
    await node.ticks(round(FINE_SPAN_S) + 60)
    node.clock.set_by_s += jump_s
    await node.ticks(20)
    rows = history.document()["rows"]
    times = [row[0] for row in rows]
    assert times == sorted(set(times))
    now_unix_s = node.clock.wall() - 1
    assert times[-1] == pytest.approx(now_unix_s)
    assert now_unix_s - times[0] == pytest.approx(node.clock.now_s - 1 - begin_s, abs=COARSE_S)
    assert len(rows) > FINE_SPAN_S
    json.dumps(history.document())


async def test_the_status_has_the_new_time_and_no_age_of_hours(node: StateNode) -> None:
    await node.loop.start()
    await node.ticks(3)
    node.clock.set_by_s += 5 * HOUR_S
    await node.ticks(1)
    status: Any = node.current.status()
    assert status.at_unix_s == node.clock.wall()
    assert status.observed.report_age_s <= 1.0
    assert node.current.unready() is None
