"""Journal, history and status over a clock that is set: in order, with true ages, nothing lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from state_node import StateNode

from hisparsed.control.history import COARSE_S, FINE_SPAN_S, History
from hisparsed.control.journal import Journal
from hisparsed.control.journal_store import Query, Retention
from hisparsed.control.journal_writer import JournalWriter
from hisparsed.control.records import EventKind, EventRecord

HOUR_S = 3_600.0
JUMPS = pytest.mark.parametrize("jump_s", [-5 * HOUR_S, -60.0, 60.0, 5 * HOUR_S])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StateNode]:
    (tmp_path / "state").mkdir()
    node = StateNode(tmp_path, tmp_path / "state")
    yield node
    node.close_journal()


@JUMPS
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


@JUMPS
async def test_the_history_stays_in_order_and_keeps_its_ages(
    node: StateNode, jump_s: float
) -> None:
    history = History()
    node.board.watchers.append(history.watch)
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
    status: Any = node.board.status()
    assert status.at_unix_s == node.clock.wall()
    assert status.observed.engine.report_age_s <= 1.0
    assert node.board.unready() is None
