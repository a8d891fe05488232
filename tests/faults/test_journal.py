"""A journal that is torn, scribbled over or locked: at the start, and while it is written."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from state_node import StateNode

from hisparsed.control.journal.journal import LAST_RETRY_S
from hisparsed.control.journal.store import Query

PAGE_BYTES = 4096


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateNode:
    """It has written some ticks; waits for a lock are short."""
    monkeypatch.setattr("hisparsed.control.journal.store._BUSY_WAIT_S", 0.01)
    node = StateNode(tmp_path, tmp_path / "state")
    node.state.mkdir()
    await node.loop.start()
    await node.cycles(12)
    return node


def sequences(path: Path) -> list[int]:
    """Of a file that must be sound."""
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = database.execute("SELECT sequence FROM ticks ORDER BY id").fetchall()
    return [sequence for (sequence,) in rows]


def crashed(node: StateNode, folder: Path) -> Path:
    """The state folder as a power cut would leave it: with a WAL that was not checkpointed."""
    shutil.copytree(node.state, folder)
    (folder / "journal.sqlite-shm").unlink()
    assert (folder / "journal.sqlite-wal").stat().st_size > 10 * PAGE_BYTES
    return folder / "journal.sqlite"


async def restarted(node: StateNode, state: Path) -> StateNode:
    folder = node.folder / "again"
    folder.mkdir()
    again = StateNode(folder, state)
    await again.loop.start()
    await again.cycles(3)
    return again


async def test_a_crash_loses_nothing_that_was_written(node: StateNode, tmp_path: Path) -> None:
    before = sequences(node.journal_file)
    again = await restarted(node, crashed(node, tmp_path / "crashed").parent)
    assert sequences(again.journal_file)[: len(before)] == before
    assert again.journal.health.set_aside == 0
    again.close_journal()


@pytest.mark.parametrize("seed", range(6))
async def test_a_wal_that_is_cut_anywhere_costs_the_last_writes_only(
    node: StateNode, tmp_path: Path, seed: int
) -> None:
    before = sequences(node.journal_file)
    file = crashed(node, tmp_path / "crashed")
    wal = file.with_name("journal.sqlite-wal")
    os.truncate(wal, random.Random(seed).randrange(wal.stat().st_size))
    again = await restarted(node, file.parent)
    found = sequences(again.journal_file)
    old, new = found[:-3], found[-3:]
    assert old == before[: len(old)], "a beginning of what was there, without holes"
    assert new == [tick.sequence for tick in again.journal.ticks][-3:]
    again.close_journal()


async def test_a_wal_with_a_scribbled_page_costs_the_writes_from_there(
    node: StateNode, tmp_path: Path
) -> None:
    before = sequences(node.journal_file)
    file = crashed(node, tmp_path / "crashed")
    with file.with_name("journal.sqlite-wal").open("r+b") as wal:
        wal.seek(-3 * PAGE_BYTES, os.SEEK_END)
        wal.write(random.Random(1).randbytes(PAGE_BYTES))
    again = await restarted(node, file.parent)
    old = sequences(again.journal_file)[:-3]
    assert len(old) < len(before)
    assert old == before[: len(old)]
    again.close_journal()


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2 // PAGE_BYTES * PAGE_BYTES - 100)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def scribbled(file: Path) -> None:
    """Every page but the first."""
    with file.open("r+b") as pages:
        pages.seek(PAGE_BYTES)
        pages.write(random.Random(2).randbytes(file.stat().st_size - PAGE_BYTES))


def headless(file: Path) -> None:
    with file.open("r+b") as pages:
        pages.write(random.Random(3).randbytes(PAGE_BYTES))


DAMAGES = pytest.mark.parametrize("damage", [truncated, scribbled, headless])


@DAMAGES
async def test_a_damaged_file_at_the_start_is_quarantined_and_told(
    node: StateNode, damage: Callable[[Path], None]
) -> None:
    node.close_journal()  # folds the WAL in
    damage(node.journal_file)
    again = await restarted(node, node.state)
    assert sequences(again.journal_file) == [tick.sequence for tick in again.journal.ticks]
    assert again.journal.health.dropped == 0
    assert len(list(node.state.glob("journal.sqlite.damaged-*"))) == 1
    (told,) = again.sentences("journal-set-aside")
    assert "a new one was created" in told
    again.close_journal()


@pytest.mark.parametrize("damage", [truncated, emptied, scribbled, headless])
async def test_damage_under_a_daemon_that_writes_ends_in_a_sound_journal(
    node: StateNode, damage: Callable[[Path], None]
) -> None:
    with closing(sqlite3.connect(node.journal_file)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(node.journal_file)
    for _ in range(8):
        await node.cycles(1)
        node.clock.now_s += LAST_RETRY_S
    await node.cycles(1)
    assert node.journal.health.error is None
    last = node.journal.ticks[-1]
    assert sequences(node.journal_file)[-1] == last.sequence
    assert len(node.journal.ticks) == 21, "no tick was lost to the loop"
    (view, *_) = await node.journal.decisions(Query(limit=1))
    assert view.sequence == last.sequence
    node.close_journal()


@pytest.mark.parametrize("left_bytes", [None, 0, 100, 30_000])
async def test_a_wal_cut_or_removed_under_a_daemon_ends_in_a_sound_journal(
    node: StateNode, left_bytes: int | None
) -> None:
    wal = node.journal_file.with_name("journal.sqlite-wal")
    if left_bytes is None:
        wal.unlink()
    else:
        os.truncate(wal, left_bytes)
    for _ in range(8):
        await node.cycles(1)
        node.clock.now_s += LAST_RETRY_S
    await node.cycles(1)
    assert node.journal.health.error is None
    assert sequences(node.journal_file)[-1] == node.journal.ticks[-1].sequence
    node.close_journal()


async def test_a_wal_that_somebody_folded_in_is_no_damage(node: StateNode) -> None:
    before = sequences(node.journal_file)
    with closing(sqlite3.connect(node.journal_file)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    await node.cycles(2)
    assert sequences(node.journal_file)[: len(before)] == before
    assert (node.journal.health.failures, node.journal.health.set_aside) == (0, 0)
    node.close_journal()


async def test_a_journal_that_somebody_locks_is_written_again_when_they_are_done(
    node: StateNode,
) -> None:
    before = sequences(node.journal_file)
    with closing(sqlite3.connect(node.journal_file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await node.cycles(2)
        assert node.journal.health.error == "database is locked"
        assert len(node.sentences("state-not-kept")) == 1
        assert len(await node.journal.decisions(Query(limit=1_000))) > len(before)
        other.execute("ROLLBACK")
    node.clock.now_s += LAST_RETRY_S
    await node.cycles(2)
    found = sequences(node.journal_file)
    assert found[: len(before)] == before
    assert found[-1] == node.journal.ticks[-1].sequence
    assert node.sentences("state-kept") == ["Written again: the journal."]
    assert node.journal.health.set_aside == 0
    node.close_journal()
