"""The journal: memory and file joined, and every kind of trouble with the disk."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparsed.control.journal.journal import FIRST_RETRY_S, LAST_RETRY_S, Journal, JournalWriter
from hisparsed.control.journal.records import (
    DECISION_JSON,
    SNAPSHOT_JSON,
    PolicyRecord,
    TickRecord,
    jsonable,
    view_tick,
)
from hisparsed.control.journal.store import FILE_NAME, JournalStore, Query, Retention
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.forecasts import Figure, Outcome
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever

RECORDED = Path(__file__).parents[2] / "tui" / "recorded" / "tick.json"
WRITE_AGAIN = """
import sys
from hisparsed.control.journal.records import SNAPSHOT_JSON
print(SNAPSHOT_JSON.dump_json(SNAPSHOT_JSON.validate_json(sys.stdin.buffer.read())).decode())
"""


def written(snapshot: bytes, hash_seed: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", WRITE_AGAIN],
        input=snapshot,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
    ).stdout.decode()


def test_a_snapshot_is_written_the_same_whatever_the_order_of_sets() -> None:
    snapshot = json.loads(RECORDED.read_text("utf-8"))["snapshot"]
    snapshot["frozen_levers"] = snapshot["live_levers"]
    texts = {written(json.dumps(snapshot).encode(), seed) for seed in (1, 2, 3)}
    assert len(texts) == 1
    assert json.loads(texts.pop())["live_levers"] == sorted(snapshot["live_levers"])


class Disk:
    """A writer on a folder with a clock to set and everything it logged."""

    def __init__(
        self, folder: Path, run: str = "run-1", retention: Retention | None = None
    ) -> None:
        self.now_s = 0.0
        self.logged: list[str] = []
        self.folder = folder
        self.file = folder / FILE_NAME
        self.fail_with: Exception | None = None
        self.writer = JournalWriter(
            folder,
            run=run,
            clock=lambda: self.now_s,
            stamp=lambda: "20260101T000000",
            log=self.logged.append,
            retention=retention,
            open_store=self.open_store,
        )

    def open_store(self, *args: Any, **kwargs: Any) -> JournalStore:
        disk = self

        class Failing(JournalStore):
            def write(self, records: Any) -> None:
                if disk.fail_with is not None:
                    raise disk.fail_with
                super().write(records)

        return Failing(*args, **kwargs)

    def rows(self, sql: str) -> list[Any]:
        database = sqlite3.connect(self.file)
        try:
            return database.execute(sql).fetchall()
        finally:
            database.close()


def error(code: int, text: str) -> sqlite3.OperationalError:
    made = sqlite3.OperationalError(text)
    made.sqlite_errorcode = code
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
async def record(node: Any) -> TickRecord:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(1)
    return node.journal.ticks[0]  # type: ignore[no-any-return]


@pytest.fixture
def numbered(record: TickRecord) -> Callable[[int], TickRecord]:
    return lambda number: replace(record, sequence=number, at_unix_s=1_000.0 + number)


async def test_a_record_comes_back_as_it_was(disk: Disk, record: TickRecord) -> None:
    disk.writer.write([record])
    ((snapshot, decision),) = disk.rows("SELECT snapshot, decision FROM ticks")
    assert SNAPSHOT_JSON.validate_json(snapshot) == record.snapshot
    assert DECISION_JSON.validate_json(decision) == record.decision


async def test_what_a_move_was_to_bring_and_what_came_come_back(
    disk: Disk, record: TickRecord
) -> None:
    expected = {Figure.FREED: 100.0, Figure.LOADED: 2e9}
    came = {Figure.FREED: 90.0, Figure.LOADED: 3e9}
    outcome = Outcome(12.0, 5.0, 4.0, 10.0, expected, came)
    split, multiplier, *others = record.decision.levers
    split = replace(split, expected={Figure.REACH: 64.0})
    multiplier = replace(multiplier, outcome=outcome)
    decision = replace(record.decision, levers=(split, multiplier, *others))
    disk.writer.write([replace(record, decision=decision)])
    ((text,),) = disk.rows("SELECT decision FROM ticks")
    assert DECISION_JSON.validate_json(text) == decision
    first, second, *_ = view_tick(replace(record, decision=decision))
    assert first.expected == {Figure.REACH: 64.0}
    assert second.outcome == outcome
    assert outcome.errors == {Figure.FREED: 0.1, Figure.LOADED: 0.5}
    assert jsonable(second)["outcome"]["came"] == {
        "freed_gpu_blocks": 90.0,
        "loaded_bytes_per_s": 3e9,
    }


async def test_a_decision_from_before_moves_were_judged_is_read(record: TickRecord) -> None:
    old = DECISION_JSON.dump_python(record.decision, mode="json")
    for lever in old["levers"]:
        del lever["expected"], lever["outcome"]
    assert DECISION_JSON.validate_json(json.dumps(old)) == replace(
        record.decision,
        levers=tuple(replace(one, expected={}, outcome=None) for one in record.decision.levers),
    )


async def test_a_recorded_snapshot_is_decided_the_same_again(
    node: Any, disk: Disk, record: TickRecord
) -> None:
    disk.writer.write([record])
    ((text,),) = disk.rows("SELECT snapshot FROM ticks")
    policy = node.source.active.value
    again, _ = decide(policy, SNAPSHOT_JSON.validate_json(text), Memory())
    assert again == record.decision
    other, _ = decide(Policy(version=1, mode="off"), SNAPSHOT_JSON.validate_json(text), Memory())
    assert other.of(Lever.SPLIT).reason is Reason.OFF


async def test_a_full_disk_stops_the_file_not_the_caller(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.writer.write([numbered(1)])
    disk.fail_with = error(sqlite3.SQLITE_FULL, "database or disk is full")
    disk.writer.write([numbered(2)])
    disk.writer.write([numbered(3)])
    health = disk.writer.health
    assert (health.written, health.dropped, health.failures) == (1, 2, 1)
    assert health.error == "database or disk is full"
    assert len(disk.logged) == 1
    disk.fail_with = None
    disk.now_s = FIRST_RETRY_S
    disk.writer.write([numbered(4)])
    assert disk.writer.health.error is None
    assert disk.rows("SELECT sequence FROM ticks") == [(1,), (4,)]
    assert "written again" in disk.logged[1]


async def test_retries_back_off_up_to_a_limit(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.fail_with = error(sqlite3.SQLITE_BUSY, "database is locked")
    tries = []
    for second in range(1_000):
        disk.now_s = float(second)
        before = disk.writer.health.failures
        disk.writer.write([numbered(second)])
        if disk.writer.health.failures > before:
            tries.append(second)
    assert tries == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    assert tries[-1] - tries[-2] == LAST_RETRY_S
    assert len(disk.logged) == 1
    assert disk.writer.health.dropped == 1_000


async def test_a_file_locked_by_another_process_is_trouble_of_the_moment(
    disk: Disk, numbered: Callable[[int], TickRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparsed.control.journal.store._BUSY_WAIT_S", 0.01)
    disk.writer.write([numbered(1)])
    disk.writer.close()
    other = sqlite3.connect(disk.file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    disk.writer.write([numbered(2)])
    assert disk.writer.health.error == "database is locked"
    other.execute("ROLLBACK")
    other.close()
    disk.now_s = FIRST_RETRY_S
    disk.writer.write([numbered(3)])
    assert disk.rows("SELECT sequence FROM ticks") == [(1,), (3,)]


async def test_a_file_that_is_no_database_is_set_aside(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.file.write_bytes(b"this is not a database, but somebody's notes\n" * 200)
    disk.writer.write([numbered(1)])
    kept = disk.folder / f"{FILE_NAME}.damaged-20260101T000000"
    assert kept.read_bytes().startswith(b"this is not a database")
    assert disk.rows("SELECT sequence FROM ticks") == [(1,)]
    assert disk.writer.health.set_aside == 1
    assert str(kept) in disk.logged[0]


async def test_a_torn_file_is_set_aside(disk: Disk, numbered: Callable[[int], TickRecord]) -> None:
    disk.writer.write([numbered(number) for number in range(40)])
    disk.writer.close()
    whole = disk.file.read_bytes()
    disk.file.write_bytes(whole[: len(whole) // 2 // 4096 * 4096 - 100])
    disk.writer.write([numbered(100)])
    assert disk.writer.health.error is None
    assert disk.writer.health.set_aside == 1
    assert disk.rows("SELECT sequence FROM ticks") == [(100,)]


async def test_damage_found_while_writing_is_set_aside_too(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.writer.write([numbered(1)])
    disk.fail_with = error(sqlite3.SQLITE_CORRUPT, "database disk image is malformed")
    disk.writer.write([numbered(2)])
    disk.fail_with = None
    disk.now_s = FIRST_RETRY_S
    disk.writer.write([numbered(3)])
    assert disk.rows("SELECT sequence FROM ticks") == [(3,)]
    assert (disk.folder / f"{FILE_NAME}.damaged-20260101T000000").exists()


async def test_a_file_of_another_schema_is_set_aside(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    database = sqlite3.connect(disk.file)
    database.execute("PRAGMA user_version = 7")
    database.close()
    disk.writer.write([numbered(1)])
    assert (disk.folder / f"{FILE_NAME}.schema7-20260101T000000").exists()
    assert disk.writer.health.written == 1


async def test_a_folder_that_cannot_be_made_stops_the_file(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    disk = Disk(tmp_path / "taken")
    disk.writer.write([numbered(1)])
    assert disk.writer.health.dropped == 1
    assert "cannot be written" in disk.logged[0]


async def test_a_record_that_cannot_be_written_does_not_end_the_journal(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.fail_with = ValueError("a record that JSON cannot hold")
    disk.writer.write([numbered(1)])
    assert disk.writer.health.dropped == 1
    disk.fail_with, disk.now_s = None, FIRST_RETRY_S
    disk.writer.write([numbered(2)])
    assert disk.rows("SELECT sequence FROM ticks") == [(2,)]


async def test_old_rows_go_when_there_are_too_many(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    disk = Disk(tmp_path, retention=Retention(max_ticks=100))
    for number in range(251):
        disk.writer.write([numbered(number)])
    kept = [sequence for (sequence,) in disk.rows("SELECT sequence FROM ticks")]
    assert kept == list(range(kept[0], 251))
    assert 80 <= len(kept) <= 150
    ((orphans,),) = disk.rows(
        "SELECT COUNT(*) FROM outcomes WHERE tick_id NOT IN (SELECT id FROM ticks)"
    )
    assert orphans == 0


async def test_old_rows_go_when_the_file_is_too_large(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    disk = Disk(tmp_path, retention=Retention(max_bytes=300_000))
    for number in range(451):
        disk.writer.write([numbered(number)])
    disk.writer.close()
    assert disk.file.stat().st_size < 600_000
    ((last,),) = disk.rows("SELECT MAX(sequence) FROM ticks")
    assert last == 450


async def test_reading_joins_ring_and_file(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    earlier = Disk(tmp_path, run="run-0")
    earlier.writer.write([numbered(number) for number in range(3)])
    earlier.writer.close()
    disk = Disk(tmp_path)
    journal = Journal(disk.writer, run="run-1", ring_ticks=2)
    journal.start()
    for number in range(10, 15):
        journal.record(numbered(number))
    journal.close()
    assert journal.health.written == 5
    views = await journal.decisions(Query(limit=7, lever=Lever.SPLIT))
    assert [view.at_unix_s - 1_000 for view in views] == [14, 13, 12, 11, 10, 2, 1]
    views = await journal.decisions(Query(limit=50, since_unix_s=1_011.0, lever=Lever.SPLIT))
    assert [view.at_unix_s - 1_000 for view in views] == [14, 13, 12, 11]
    views = await journal.decisions(Query(limit=50, code="AtTarget", lever=Lever.SPLIT))
    assert views == []
    (view, *_) = await journal.decisions(Query(limit=1, code="OffloadShortOfReach"))
    assert view.acts
    assert view.figures == numbered(14).decision.of(Lever.SPLIT).figures
    with_disk = len(await journal.decisions(Query(limit=1_000)))
    disk.file.write_bytes(b"no database any more" * 300)
    assert len(await journal.decisions(Query(limit=1_000))) < with_disk


async def test_a_stuck_disk_never_blocks_the_loop(
    tmp_path: Path, numbered: Callable[[int], TickRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparsed.control.journal.journal.QUEUE_RECORDS", 10)
    stuck, writing = threading.Event(), threading.Event()
    disk = Disk(tmp_path)
    write = disk.writer.write

    def write_when_freed(records: Any) -> None:
        writing.set()
        stuck.wait(30)
        write(records)

    monkeypatch.setattr(disk.writer, "write", write_when_freed)
    journal = Journal(disk.writer, run="run-1")
    journal.start()
    journal.record(numbered(0))
    assert writing.wait(30)
    for number in range(1, 16):
        journal.record(numbered(number))
    assert journal.health.dropped == 5
    assert len(journal.ticks) == 16
    stuck.set()
    journal.close()
    assert journal.health.written == 11


async def test_a_file_removed_under_the_writer_is_begun_anew(
    disk: Disk, numbered: Callable[[int], TickRecord]
) -> None:
    disk.writer.write([numbered(1)])
    disk.file.unlink()
    disk.writer.write([numbered(2)])
    assert disk.writer.health.error is None
    assert disk.writer.health.lost == 1
    assert disk.logged == [
        f"The journal {disk.file} was removed or replaced; a new one was created."
    ]
    assert disk.rows("select count(*) from ticks") == [(1,)]
    disk.writer.close()


def policy_record(generation: int, at_unix_s: float) -> PolicyRecord:
    return PolicyRecord(at_unix_s, generation, {"generation": generation})


async def test_the_policy_of_the_oldest_tick_is_kept_and_none_before_it(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    disk = Disk(tmp_path, retention=Retention(max_ticks=100))
    for number in range(251):
        tick = numbered(number)
        if number % 20 == 0:
            disk.writer.write([policy_record(number, tick.at_unix_s)])
        disk.writer.write([tick])
    ((oldest,),) = disk.rows("SELECT MIN(sequence) FROM ticks")
    kept = [generation for (generation,) in disk.rows("SELECT generation FROM policies")]
    assert kept == list(range(oldest // 20 * 20, 251, 20))


def test_a_file_that_is_begun_anew_knows_the_policy(
    tmp_path: Path, numbered: Callable[[int], TickRecord]
) -> None:
    disk = Disk(tmp_path)
    disk.writer.write([policy_record(1, 5.0), policy_record(2, 6.0), numbered(1)])
    for part in tmp_path.glob(f"{FILE_NAME}*"):
        part.unlink()
    disk.writer.write([numbered(2)])
    assert disk.rows("SELECT generation, at_unix_s FROM policies") == [(2, 6.0)]
    assert disk.rows("SELECT sequence FROM ticks") == [(2,)]
