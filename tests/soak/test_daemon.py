"""The daemon's soak: values an operator may set, and the counts of the client and the journal."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from hisparsed.control.journal.records import APPLIED_JSON, Applied
from hisparsed.demo.node import policy_document
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.effective import check_policy, parse_policy
from hisparsed.policy.schedules import Override
from hisparsed.soak.daemon import FIRST_VALUES, DaemonRun, applied_commands, next_value, tally_of

RESULT = FakeEngine().apply(EngineCommand())
MOVED = Applied(EngineCommand(multiplier=2.0), RESULT.model_copy(update={"apply_us": 250.0}), None)
BROKEN = Applied(
    EngineCommand(), None, "levers are frozen: the host ledger broke held-adds-up (...)"
)
REFUSED = Applied(EngineCommand(), None, "multiplier 0.5 is below 1x top-k")


def override(key: str, value: str | int | float) -> Override:
    return Override(key, value, "soak", 0.0, None)


def test_every_value_that_is_set_is_one_that_the_policy_takes() -> None:
    loaded = parse_policy(policy_document("act"), "policy.yaml").loaded
    standing = [override(key, value) for key, value in FIRST_VALUES.items()]
    for count in range(1, len(standing) + 1):
        check_policy(loaded, standing[:count])
    rng = random.Random(0)
    drawn = [next_value(rng) for _ in range(300)]
    assert len({key for key, _ in drawn}) == 6
    assert len(set(drawn)) > 50
    for key, value in set(drawn):
        check_policy(loaded, [*standing, override(key, value)])


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE ticks (id INTEGER PRIMARY KEY, applied TEXT NOT NULL)")
        for one in (None, MOVED, None, BROKEN):
            text = APPLIED_JSON.dump_json(one).decode()
            store.execute("INSERT INTO ticks (applied) VALUES (?)", (text,))
        store.commit()
    return path


def test_the_journal_has_every_move_in_order(journal: Path) -> None:
    assert applied_commands(journal) == [MOVED, BROKEN]


def test_a_command_refused_for_a_broken_ledger_is_a_violation_and_others_are_not() -> None:
    tally = tally_of(DaemonRun(requests=7, stuck=1), [MOVED, REFUSED, BROKEN])
    assert (tally.requests, tally.stuck, tally.moves) == (7, 1, 3)
    assert tally.violations == [BROKEN.error]
    assert tally.moves_refused == 2
    assert tally.move_us == [250.0]
