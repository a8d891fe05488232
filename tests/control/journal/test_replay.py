"""Replaying a journal: the same policy decides the same, another parts where it must."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from hisparsed.control.journal.replay import Replay, replay_journal
from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.text.policy import replay_text
from hisparsed.errors import UserError
from hisparsed.policy.effective import parse_policy
from hisparsed.policy.signals import Lever, Snapshot

TICKS = 12


@pytest.fixture
async def journal(node: Any) -> Path:
    """A recording in which the offload pool is short and is put right in steps."""
    node.journal.start()
    await node.loop.start()
    node.engine.target = 10
    node.engine.cached = 500
    await node.ticks(TICKS)
    node.journal.close()
    path: Path = node.folder / "state" / FILE_NAME
    return path


def replay(path: Path, text: str, **how: Any) -> Replay:
    return replay_journal(path, parse_policy(text, "other.yaml"), **how)


def test_the_policy_that_was_in_force_decides_the_same(node: Any, journal: Path) -> None:
    found = replay(journal, node.policy_path.read_text())
    assert (found.ticks, found.runs, found.parted, found.first) == (TICKS, 1, 0, ())
    assert found.levers[Lever.SPLIT].recorded_moves == found.levers[Lever.SPLIT].replayed_moves > 0
    assert "decide the same in every tick" in replay_text(found)


def test_another_policy_parts_at_the_first_tick_where_it_must(node: Any, journal: Path) -> None:
    text = node.policy_path.read_text().replace("mode: act", "mode: advise")
    found = replay(journal, text, first=1)
    (first,) = found.first
    assert (first.tick, first.lever) == (1, Lever.SPLIT)
    assert (first.recorded, first.replayed) == ("OffloadShortOfReach", "AdviseOnly")
    split = found.levers[Lever.SPLIT]
    assert split.replayed_moves == 0
    assert split.replayed_reasons["AdviseOnly"] >= split.recorded_moves
    assert sum(split.replayed_reasons.values()) == sum(split.recorded_reasons.values()) == TICKS
    page = replay_text(found)
    assert "does not react to the other policy" in " ".join(page.split())
    assert "recorded  OffloadShortOfReach" in page
    assert "replayed  AdviseOnly" in page


def test_what_goes_on_tick_after_tick_is_one_difference(node: Any, journal: Path) -> None:
    text = node.policy_path.read_text().replace("mode: act", "mode: off")
    found = replay(journal, text, first=100)
    split = [one for one in found.first if one.lever is Lever.SPLIT]
    assert sum(one.ticks for one in split) == found.levers[Lever.SPLIT].parted == TICKS
    assert not any(before.goes_on(after) for before, after in pairwise(split))
    longest = max(split, key=lambda one: one.ticks)
    assert longest.ticks > 1
    assert longest.last_unix_s - longest.at_unix_s == longest.ticks - 1
    assert f"the same in {longest.ticks} ticks, until " in replay_text(found)
    (first,) = replay(journal, text, first=1).first
    assert first == found.first[0], "as long as it lasts, however few are shown"


def test_another_target_for_the_same_reason_is_a_difference(node: Any, journal: Path) -> None:
    text = node.policy_path.read_text().replace("step_towards_safety: 10%", "margin: 40%")
    (first, *_) = replay(journal, text).first
    assert first.recorded == first.replayed == "OffloadShortOfReach"
    assert first.recorded_wanted != first.replayed_wanted


def test_a_change_that_never_mattered_parts_nowhere(node: Any, journal: Path) -> None:
    text = node.policy_path.read_text() + "admission: {retry_after: 10s}\n"
    assert replay(journal, text).parted == 0


def test_schedules_count_at_the_time_of_the_recording(node: Any, journal: Path) -> None:
    text = node.policy_path.read_text() + (
        "schedules:\n  - name: then\n    when: {from: '22:15', to: '22:16', timezone: UTC}\n"
        "    set: {mode: off}\n"
    )
    found = replay(journal, text)
    assert found.levers[Lever.SPLIT].replayed_reasons == {"Off": TICKS}


def test_only_the_end_can_be_asked_for(node: Any, journal: Path) -> None:
    assert replay(journal, node.policy_path.read_text(), last_s=3.5).ticks == 4


def test_a_state_folder_and_a_copy_will_do_and_the_copy_stays_as_it_is(
    node: Any, journal: Path, tmp_path: Path
) -> None:
    text = node.policy_path.read_text()
    assert replay(journal.parent, text).ticks == TICKS
    away = tmp_path / "away"
    away.mkdir()
    shutil.copy(journal, away / "other-node.sqlite")
    assert replay(away / "other-node.sqlite", text).ticks == TICKS
    assert [path.name for path in away.iterdir()] == ["other-node.sqlite"]


def test_two_runs_are_decided_apart(node: Any, journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute("UPDATE ticks SET run = 'run-2' WHERE id > 6")
    assert replay(journal, node.policy_path.read_text()).runs == 2


def test_engines_of_one_run_are_decided_apart(node: Any, journal: Path) -> None:
    """As they were: each engine's loop begins at tick 1, and knows of no move before."""
    text = node.policy_path.read_text()
    once = text.replace("cool_down: 2s", "cool_down: 1h").replace(": 1s\n", ": 1h\n")
    once = once.replace("tick: 1h", "tick: 1s")
    assert once != text
    assert replay(journal, once).levers[Lever.SPLIT].replayed_moves == 1
    with closing(sqlite3.connect(journal)) as database, database:
        rows = database.execute("SELECT * FROM ticks ORDER BY id").fetchall()
        marks = ",".join("?" * len(rows[0]))
        again = [(row[0] + rows[-1][0], *row[1:]) for row in rows]
        database.executemany(f"INSERT INTO ticks VALUES ({marks})", again)  # noqa: S608
        database.execute(
            "UPDATE ticks SET snapshot = json_set(snapshot, '$.at_s',"
            " json_extract(snapshot, '$.at_s') + 60) WHERE id > ?",
            (rows[-1][0],),
        )
    found = replay(journal, once)
    assert (found.ticks, found.runs) == (2 * TICKS, 1)
    assert found.levers[Lever.SPLIT].replayed_moves == 2, "one for each engine"


def test_a_tick_that_cannot_be_read_is_left_out_and_counted(node: Any, journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute("UPDATE ticks SET snapshot = '{}' WHERE id = 3")
    found = replay(journal, node.policy_path.read_text())
    assert (found.ticks, found.unreadable) == (TICKS - 1, 1)
    assert "1 ticks could not be read" in replay_text(found)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such journal"),
        (lambda path: path.write_text("not a database" * 100), "cannot be read as a journal"),
        (lambda path: sqlite3.connect(path).close(), "no such table"),
    ],
)
def test_what_is_no_journal_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    path = tmp_path / "x.sqlite"
    make(path)
    if says == "no such table":
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE other (x)")
    with pytest.raises(UserError, match=says):
        replay(path, "version: 1\n")


def test_an_empty_journal_is_refused(journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database, database:
        database.execute("DELETE FROM ticks")
    with pytest.raises(UserError, match="holds no ticks"):
        replay(journal, "version: 1\n")


def _without_newer_fields(value: Any, kind: Any) -> Any:
    """A record as a daemon wrote it that did not know the fields which have a default."""
    if not is_dataclass(kind):
        return value
    hints = get_type_hints(kind)
    return {
        one.name: _without_newer_fields(value[one.name], hints[one.name])
        for one in fields(kind)
        if one.default is MISSING and one.default_factory is MISSING
    }


def test_records_without_newer_fields_still_load(node: Any, journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database, database:
        rows = database.execute("SELECT id, snapshot FROM ticks").fetchall()
        stripped = [
            (json.dumps(_without_newer_fields(json.loads(text), Snapshot)), number)
            for number, text in rows
        ]
        assert len(stripped[0][0]) < len(rows[0][1])
        database.executemany("UPDATE ticks SET snapshot = ? WHERE id = ?", stripped)
    found = replay(journal, node.policy_path.read_text())
    assert (found.ticks, found.unreadable) == (TICKS, 0)
