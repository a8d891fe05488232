"""The journal's file: SQLite in the state folder, one schema version, bounded in size.

Synchronous. The journal's thread writes; readers open the file on their own and only read. A
damaged file, or one of another version, is renamed and never deleted. Also finds one whole tick, in
memory or in the file, with its confirmation and its effect.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsed.control.journal.records import (
    APPLIED_JSON,
    CONFIRMATION_JSON,
    DECISION_JSON,
    SNAPSHOT_JSON,
    DecisionView,
    EventRecord,
    EventView,
    PolicyRecord,
    Record,
    TickRecord,
    view_lever,
)
from hisparsed.policy.events import EventKind
from hisparsed.policy.signals import Lever

SCHEMA_VERSION = 1
FILE_NAME = "journal.sqlite"
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_BUSY_WAIT_S = 1.0
_FOLDER_MODE = 0o750
_CHECK_EVERY_WRITES = 50
_SCHEMA = """
CREATE TABLE ticks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, sequence INTEGER NOT NULL,
    at_unix_s REAL NOT NULL, policy_hash TEXT NOT NULL, snapshot TEXT NOT NULL,
    decision TEXT NOT NULL, applied TEXT NOT NULL, confirmed TEXT NOT NULL, sentence TEXT);
CREATE INDEX ticks_by_time ON ticks (at_unix_s);
CREATE TABLE outcomes (
    tick_id INTEGER NOT NULL REFERENCES ticks (id) ON DELETE CASCADE, lever TEXT NOT NULL,
    code TEXT NOT NULL, notable INTEGER NOT NULL, PRIMARY KEY (tick_id, lever)) WITHOUT ROWID;
CREATE INDEX outcomes_notable ON outcomes (notable, tick_id);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, sequence INTEGER NOT NULL,
    at_unix_s REAL NOT NULL, kind TEXT NOT NULL, actor TEXT NOT NULL, sentence TEXT NOT NULL);
"""
# An addition to version 1: readers of that version ignore it.
_POLICIES = """
CREATE TABLE IF NOT EXISTS policies (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, at_unix_s REAL NOT NULL,
    generation INTEGER NOT NULL, document TEXT NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits of the file; the oldest ticks are deleted first. A tick takes about 4 KB."""

    max_ticks: int = 200_000
    max_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Query:
    """Which decisions to read, newest first; ``None`` asks for any."""

    limit: int = 50
    since_unix_s: float | None = None
    lever: Lever | None = None
    code: str | None = None
    notable_only: bool = False

    def wants(self, view: DecisionView) -> bool:
        """Whether a view matches, its age included; the reader applies ``limit``."""
        return (
            (self.since_unix_s is None or view.at_unix_s >= self.since_unix_s)
            and (self.lever is None or view.lever is self.lever)
            and (self.code is None or view.code == self.code)
            and (not self.notable_only or view.notable)
        )


def is_damaged(error: Exception) -> bool:
    """Whether the error says that the file itself is bad, not the moment."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and (code & 0xFF) in _DAMAGED


class JournalStore:
    """An open file. ``run`` distinguishes this daemon's records from those of earlier ones."""

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        retention: Retention,
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
    ) -> None:
        """Raises ``sqlite3.Error`` or ``OSError``; ``is_damaged`` detects a damaged file."""
        self._run = run
        self._retention = retention
        self._writes = 0
        self._path = path
        self._log_path = path.with_name(f"{path.name}-wal")
        self._log_bytes = 0
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        self._database = connect(path, timeout=_BUSY_WAIT_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        database = self._database
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            database.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT"
            )
        elif version != SCHEMA_VERSION:
            raise OtherVersionError(version)
        else:
            _require_sound(database)
        database.execute(_POLICIES)

    def write(self, records: Sequence[Record]) -> None:
        """All of them or none. Raises ``sqlite3.Error``."""
        database = self._database
        self._require_log()
        database.execute("BEGIN IMMEDIATE")
        try:
            for record in records:
                match record:
                    case TickRecord():
                        self._write_tick(record)
                    case EventRecord():
                        self._write_event(record)
                    case PolicyRecord():
                        self._write_policy(record)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._writes += 1
        if self._writes % _CHECK_EVERY_WRITES == 1:
            self._retain()
        self._log_bytes = self._log_size() or 0

    def _log_size(self) -> int | None:
        """Bytes of the write-ahead log; ``None`` when there is none."""
        try:
            return self._log_path.stat().st_size
        except OSError:
            return None

    def _require_log(self) -> None:
        """SQLite would continue to write after the part that was cut off, and notice it much later.

        Raises ``sqlite3.Error``.
        """
        size = self._log_size()
        if size is None and self._log_bytes:
            raise sqlite3.OperationalError("its write-ahead log was removed")
        if (size or 0) < self._log_bytes:
            with closing(open_to_read(self._path)) as fresh:
                _require_sound(fresh)

    def close(self) -> None:
        self._database.close()

    def _write_tick(self, record: TickRecord) -> None:
        cursor = self._database.execute(
            "INSERT INTO ticks (run, sequence, at_unix_s, policy_hash, snapshot, decision, applied,"
            " confirmed, sentence) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._run,
                record.sequence,
                record.at_unix_s,
                record.policy_hash,
                SNAPSHOT_JSON.dump_json(record.snapshot).decode(),
                DECISION_JSON.dump_json(record.decision).decode(),
                APPLIED_JSON.dump_json(record.applied).decode(),
                CONFIRMATION_JSON.dump_json(record.confirmed).decode(),
                record.sentence,
            ),
        )
        self._database.executemany(
            "INSERT INTO outcomes (tick_id, lever, code, notable) VALUES (?, ?, ?, ?)",
            [
                (cursor.lastrowid, one.lever.value, one.reason.value, one.lever in record.notable)
                for one in record.decision.levers
            ],
        )

    def _write_event(self, record: EventRecord) -> None:
        self._database.execute(
            "INSERT INTO events (run, sequence, at_unix_s, kind, actor, sentence)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._run,
                record.sequence,
                record.at_unix_s,
                record.kind.value,
                record.actor,
                record.sentence,
            ),
        )

    def _write_policy(self, record: PolicyRecord) -> None:
        self._database.execute(
            "INSERT INTO policies (run, at_unix_s, generation, document) VALUES (?, ?, ?, ?)",
            (self._run, record.at_unix_s, record.generation, json.dumps(record.document)),
        )

    def _retain(self) -> None:
        database, keep = self._database, self._retention
        first, last = database.execute("SELECT MIN(id), MAX(id) FROM ticks").fetchone()
        if first is None:
            return
        ticks = last - first + 1
        pages, free, page_bytes = (
            database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        used_bytes = (pages - free) * page_bytes
        # A tenth more than needed is deleted, so that this is rare.
        surplus = max(ticks - keep.max_ticks, 0)
        if used_bytes > keep.max_bytes:
            surplus = max(surplus, round(ticks * (1 - keep.max_bytes / used_bytes)))
        if surplus == 0:
            return
        upto = min(last - 1, first + surplus + ticks // 10)
        database.execute("BEGIN IMMEDIATE")
        database.execute("DELETE FROM ticks WHERE id <= ?", (upto,))
        # By order and not by time, because the clock may have been set.
        database.execute(
            "DELETE FROM events WHERE id <= (SELECT MAX(e.id) FROM events e JOIN ticks t"
            " ON t.run = e.run AND e.sequence < t.sequence"
            " WHERE t.id = (SELECT MIN(id) FROM ticks))"
        )
        # The policy in force at the first tick that is left stays.
        database.execute(
            "DELETE FROM policies WHERE id < (SELECT MAX(id) FROM policies WHERE at_unix_s <="
            " (SELECT at_unix_s FROM ticks ORDER BY id LIMIT 1))"
        )
        database.execute("COMMIT")
        database.execute("PRAGMA incremental_vacuum").fetchall()


def _require_sound(database: sqlite3.Connection) -> None:
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


class OtherVersionError(Exception):
    """The file was written with a schema this daemon does not know."""

    def __init__(self, version: int) -> None:
        super().__init__(f"schema version {version}, this daemon writes {SCHEMA_VERSION}")
        self.version = version


def set_aside(path: Path, label: str) -> Path:
    """Rename the file and its side files; returns the new name of the file."""
    target = path.with_name(f"{path.name}.{label}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(target.with_name(target.name + suffix))
    return target


def read_decisions(path: Path, query: Query, *, run: str, before: int) -> Iterator[DecisionView]:
    """Decisions in the file, newest first, except those of ``run`` from ``before`` on.

    Opens the file read-only. Raises ``sqlite3.Error``.
    """
    where = ["NOT (t.run = ? AND t.sequence >= ?)"]
    parameters: list[str | int | float] = [run, before]
    if query.since_unix_s is not None:
        where.append("t.at_unix_s >= ?")
        parameters.append(query.since_unix_s)
    if query.lever is not None:
        where.append("o.lever = ?")
        parameters.append(query.lever.value)
    if query.code is not None:
        where.append("o.code = ?")
        parameters.append(query.code)
    if query.notable_only:
        where.append("o.notable = 1")
    parameters.append(query.limit)
    sql = (
        "SELECT t.sequence, t.at_unix_s, t.policy_hash, t.decision, t.applied, o.lever, o.notable"  # noqa: S608
        " FROM outcomes o JOIN ticks t ON t.id = o.tick_id"
        f" WHERE {' AND '.join(where)} ORDER BY t.id DESC, o.lever LIMIT ?"
    )
    with closing(open_to_read(path)) as database:
        for (
            sequence,
            at,
            policy_hash,
            decision_json,
            applied_json,
            lever,
            notable,
        ) in database.execute(sql, parameters):
            decision = DECISION_JSON.validate_json(decision_json)
            yield view_lever(
                decision.of(Lever(lever)),
                decision,
                APPLIED_JSON.validate_json(applied_json),
                sequence=sequence,
                at_unix_s=at,
                policy_hash=policy_hash,
                notable=bool(notable),
            )


def read_events(path: Path, limit: int, *, run: str, before: int) -> list[EventView]:
    """Events in the file, newest first, except those of ``run`` from ``before`` on."""
    with closing(open_to_read(path)) as database:
        rows = database.execute(
            "SELECT sequence, at_unix_s, kind, actor, sentence FROM events"
            " WHERE NOT (run = ? AND sequence >= ?) ORDER BY id DESC LIMIT ?",
            (run, before, limit),
        ).fetchall()
    return [
        EventView(
            sequence=sequence, at_unix_s=at, kind=EventKind(kind), actor=actor, sentence=sentence
        )
        for sequence, at, kind, actor, sentence in rows
    ]


def open_to_read(path: Path) -> sqlite3.Connection:
    """For reading alongside a daemon that writes. Raises ``sqlite3.Error``."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_WAIT_S)


def open_copy(path: Path) -> sqlite3.Connection:
    """A file that may be a copy at rest: then nothing is written next to it, not even by SQLite."""
    if path.with_name(f"{path.name}-wal").exists():
        return open_to_read(path)
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


EFFECT_S = 60.0
"""How long after a tick its effect is read."""

_SAME_TIME_S = 0.001
_CONFIRMED_WITHIN = 5
_COLUMNS = "sequence, at_unix_s, policy_hash, decision, applied, confirmed, snapshot, sentence, run"


def tick_in_memory(
    ticks: tuple[TickRecord, ...], sequence: int, at_unix_s: float | None
) -> dict[str, Any] | None:
    """The tick's document; ``None`` when memory does not hold it. ``ticks`` oldest first."""
    for index, record in enumerate(ticks):
        if record.sequence != sequence:
            continue
        if at_unix_s is not None and abs(record.at_unix_s - at_unix_s) > _SAME_TIME_S:
            continue
        later = ticks[index + 1 :]
        confirmed = next(
            (one.confirmed for one in later if _confirms(one, record.decision.tick)), None
        )
        within = [one for one in later if one.at_unix_s <= record.at_unix_s + EFFECT_S]
        after = within[-1] if within else None
        return {
            "sequence": record.sequence,
            "at_unix_s": record.at_unix_s,
            "policy_hash": record.policy_hash,
            "sentence": record.sentence,
            "decision": _plain(DECISION_JSON.dump_json(record.decision)),
            "applied": _plain(APPLIED_JSON.dump_json(record.applied)),
            "snapshot": _plain(SNAPSHOT_JSON.dump_json(record.snapshot)),
            "confirmation": _plain(CONFIRMATION_JSON.dump_json(confirmed)),
            "after": None
            if after is None
            else {
                "at_unix_s": after.at_unix_s,
                "snapshot": _plain(SNAPSHOT_JSON.dump_json(after.snapshot)),
            },
        }
    return None


def _confirms(record: TickRecord, tick: int) -> bool:
    return record.confirmed is not None and record.confirmed.tick == tick


def tick_in_file(
    path: Path, sequence: int, at_unix_s: float | None, *, run: str
) -> dict[str, Any] | None:
    """The same from the file; without a time, of this ``run``. Raises ``sqlite3.Error``."""
    where, values = "run = ? AND sequence = ?", [run, sequence]
    if at_unix_s is not None:
        where = "sequence = ? AND at_unix_s BETWEEN ? AND ?"
        values = [sequence, at_unix_s - _SAME_TIME_S, at_unix_s + _SAME_TIME_S]
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        found = database.execute(
            f"SELECT {_COLUMNS} FROM ticks WHERE {where}",  # noqa: S608 (our own words)
            values,
        ).fetchone()
        if found is None:
            return None
        number, at, policy_hash, decision_text, applied, _, snapshot, sentence, its_run = found
        decision = json.loads(decision_text)
        later = database.execute(
            "SELECT confirmed FROM ticks WHERE run = ? AND sequence > ? AND at_unix_s >= ?"
            " ORDER BY at_unix_s LIMIT ?",
            (its_run, number, at, _CONFIRMED_WITHIN),
        ).fetchall()
        after = database.execute(
            "SELECT at_unix_s, snapshot FROM ticks WHERE run = ? AND sequence > ?"
            " AND at_unix_s BETWEEN ? AND ? ORDER BY at_unix_s DESC LIMIT 1",
            (its_run, number, at, at + EFFECT_S),
        ).fetchone()
    confirmations = [json.loads(text) for (text,) in later]
    return {
        "sequence": number,
        "at_unix_s": at,
        "policy_hash": policy_hash,
        "sentence": sentence,
        "decision": decision,
        "applied": json.loads(applied),
        "snapshot": json.loads(snapshot),
        "confirmation": next(
            (one for one in confirmations if one is not None and one["tick"] == decision["tick"]),
            None,
        ),
        "after": None
        if after is None
        else {"at_unix_s": after[0], "snapshot": json.loads(after[1])},
    }


_plain: Callable[[bytes], Any] = json.loads
