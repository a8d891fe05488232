"""A state or model folder that is full, read-only or gone: the node still serves and reports it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from control_node import Node
from state_node import LimitedDisk, RealDisk, StateNode, not_permitted

from hisparsed.canary.watch import FOLDER, MOST_FILES, save_evidence
from hisparsed.control.journal.journal import FIRST_RETRY_S
from hisparsed.control.operator import restore_overrides
from hisparsed.control.state_files import TARGETS_FILE_NAME, OverrideFile, TargetFile, Targets
from hisparsed.engine.reference.model_folder import model_config, write_model_folder
from hisparsed.node.engine import records


@pytest.fixture(params=["a full file system", "a limit on file sizes"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Something with ``folder`` and ``full``."""
    if request.param == "a limit on file sizes":
        return LimitedDisk(tmp_path / "state")
    return request.getfixturevalue("real_disk")


async def started(folder: Path, state: Path) -> StateNode:
    """A node that has written its first targets, one value and some ticks."""
    node = StateNode(folder, state)
    await node.loop.start()
    node.set_value("hot.max", 3)
    await node.cycles(3)
    assert node.journal.health.error is None
    return node


async def trouble(node: StateNode) -> None:
    """Moves to write down, a value to write down, and ticks."""
    node.engine.target = 10
    node.set_value("hot.max", 2)
    await node.cycles(3)


async def after_the_retry(node: StateNode) -> None:
    node.clock.now_s += FIRST_RETRY_S
    await node.cycles(2)


def kept_targets(node: StateNode) -> Targets | None:
    snapshot = node.journal.ticks[-1].snapshot
    policy_hash = node.source.active.content_hash
    return TargetFile(node.state).load(policy_hash, snapshot.geometry)


def ticks_in_file(node: StateNode) -> list[int]:
    with closing(sqlite3.connect(node.journal_file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = database.execute("SELECT sequence FROM ticks ORDER BY id").fetchall()
    return [sequence for (sequence,) in rows]


def assert_told_and_mended(node: StateNode, *, files: int) -> None:
    """One event for each of the files and the journal, and one when it had ended."""
    assert len(node.sentences("state-not-kept")) == files + 1
    assert len(node.sentences("state-kept")) == files + 1
    assert node.metric("hisparsed_journal_writing") == 1
    assert node.metric("hisparsed_state_kept") == 1
    kept = kept_targets(node)
    assert kept is not None
    assert kept.offload_target_blocks == node.engine.target
    (override,) = OverrideFile(node.state).load()
    assert override.value == 2


async def test_a_full_disk_stops_the_files_and_nothing_else(tmp_path: Path, disk: Any) -> None:
    node = await started(tmp_path, disk.folder)
    before, in_file = kept_targets(node), ticks_in_file(node)
    with disk.full():
        await trouble(node)
        ticks = len(node.journal.ticks)
        assert ticks == 6, "the loop goes on"
        assert node.engine.target > 10, "and so do its moves"
        assert node.source.in_force.policy.hot.max == 2.0
        assert node.metric("hisparsed_journal_writing") == 0
        assert node.metric("hisparsed_state_kept") == 0
        assert node.metric("hisparsed_journal_dropped_records_total") > 0
        told = "\n".join(node.sentences("state-not-kept"))
        for file in ("journal.sqlite", "targets.json", "overrides.json"):
            assert file in told
        assert "will not survive a restart" in node.sentences("value-set")[-1]
        assert kept_targets(node) == before, "what was written last can still be read"
        assert json.loads((node.state / "overrides.json").read_text())["overrides"][0]["value"] == 3
        assert list(node.state.glob("*.new")) == [], "nothing half written stays"
    await after_the_retry(node)
    assert_told_and_mended(node, files=2)
    assert ticks_in_file(node)[: len(in_file)] == in_file
    assert ticks_in_file(node)[-1] == node.journal.ticks[-1].sequence
    node.close_journal()


async def test_the_status_says_what_is_not_kept_and_why(
    tmp_path: Path, real_disk: RealDisk
) -> None:
    node = await started(tmp_path, real_disk.folder)
    with real_disk.full():
        await trouble(node)
        status = node.current.status()
        assert status.journal.error == "database or disk is full"
        assert len(status.not_kept) == 2
        assert all(why.endswith("No space left on device") for why in status.not_kept)
    await after_the_retry(node)
    assert node.current.status().not_kept == []
    node.close_journal()


@pytest.mark.parametrize("save", [save_evidence, records.save_evidence])
def test_evidence_on_a_full_disk_is_whole_or_not_there(real_disk: RealDisk, save: Any) -> None:
    first = save(real_disk.folder, {"at_unix_s": 1.0, "what": "x" * 10_000})
    with real_disk.full(), pytest.raises(OSError, match="No space left"):
        save(real_disk.folder, {"at_unix_s": 2.0, "what": "y" * 10_000})
    assert list(first.parent.iterdir()) == [first]
    assert json.loads(first.read_text())["what"] == "x" * 10_000
    assert len(list(save(real_disk.folder, {"at_unix_s": 2.0}).parent.iterdir())) == 2


async def test_a_file_system_that_turns_read_only(tmp_path: Path, real_disk: RealDisk) -> None:
    node = await started(tmp_path, real_disk.folder)
    node.close_journal()  # Linux remounts nothing that is open for writing
    real_disk.read_only()
    await trouble(node)
    assert len(node.sentences("state-not-kept")) == 3
    assert "Read-only file system" in "\n".join(node.current.status().not_kept)
    real_disk.writable()
    await after_the_retry(node)
    assert_told_and_mended(node, files=2)
    node.close_journal()


async def test_a_folder_that_becomes_somebody_elses(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    node = await started(tmp_path, state)
    with not_permitted(state):
        await trouble(node)
        assert len(node.sentences("state-not-kept")) == 3
        assert "Permission denied" in "\n".join(node.current.status().not_kept)
    await after_the_retry(node)
    assert_told_and_mended(node, files=2)
    node.close_journal()


async def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    node = await started(tmp_path, state)
    shutil.rmtree(state)
    await trouble(node)
    await after_the_retry(node)
    kept = kept_targets(node)
    assert kept is not None
    assert kept.offload_target_blocks == node.engine.target
    assert OverrideFile(state).load() == node.source.overrides
    assert ticks_in_file(node)[-1] == node.journal.ticks[-1].sequence
    assert state.stat().st_mode & 0o777 == 0o750
    assert node.current.status().not_kept == []
    node.close_journal()


async def test_a_file_where_the_folder_was_is_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    node = await started(tmp_path, state)
    shutil.rmtree(state)
    state.write_text("somebody's notes")
    await trouble(node)
    assert len(node.sentences("state-not-kept")) == 3
    assert state.read_text() == "somebody's notes"
    state.unlink()
    await after_the_retry(node)
    await after_the_retry(node)
    assert_told_and_mended(node, files=2)
    node.close_journal()


async def test_a_start_on_a_damaged_file_that_cannot_be_quarantined(
    tmp_path: Path, real_disk: RealDisk
) -> None:
    (real_disk.folder / "overrides.json").write_text("{")
    (real_disk.folder / TARGETS_FILE_NAME).write_text('{"version": 1, "policy_ha')
    real_disk.read_only()
    node = Node(tmp_path, state=real_disk.folder)
    restore_overrides(node.source, node.recorder, real_disk.folder)
    (event, *_) = node.journal.recent_events(1)
    assert "cannot be kept as" in event.sentence
    assert "Read-only file system" in event.sentence
    await node.loop.start()
    await node.ticks(2)
    assert len(node.journal.ticks) == 2


@pytest.mark.parametrize(
    ("save", "folder"),
    [(save_evidence, FOLDER), (records.save_evidence, records.FOLDER)],
)
def test_the_newest_evidence_stays_after_a_clock_was_set_back(
    tmp_path: Path, save: Any, folder: str
) -> None:
    for hour in range(MOST_FILES + 2):
        save(tmp_path, {"at_unix_s": 1_700_000_000.0 + 3_600 * hour})
    for minute in range(3):
        last = save(tmp_path, {"at_unix_s": 1_600_000_000.0 + 60 * minute})
        kept = sorted((tmp_path / folder).iterdir())
        assert len(kept) == MOST_FILES
        assert kept[-1] == last
    times = [json.loads(path.read_text())["at_unix_s"] for path in kept]
    assert times[-3:] == [1_600_000_000.0 + 60 * minute for minute in range(3)]


def config(max_model_len: int) -> dict[str, object]:
    return model_config(
        layers=2, index_groups=1, index_topk=16, max_model_len=max_model_len, seed=0
    )


def test_an_engine_that_ran_starts_again_on_a_full_disk(real_disk: RealDisk) -> None:
    folder = write_model_folder(real_disk.folder / "model", config(512))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with real_disk.full():
        write_model_folder(folder, config(512))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_model_that_has_no_room_is_told_by_its_file_and_leaves_nothing(
    real_disk: RealDisk,
) -> None:
    folder = write_model_folder(real_disk.folder / "model", config(512))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with real_disk.full(), pytest.raises(OSError, match=r"No space left.*config\.json"):
        write_model_folder(folder, config(1024))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
