"""Reads the daemon's journal file: ticks and events by time, from SQLite, never writing.

A truncated or damaged file is read as far as possible. Synchronous; ``journal_player`` plays it.
Knows the file's schema and nothing of the daemon's code.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hisparsed.tui.options import ViewError
from hisparsed.tui.wire import Document, parse_object

SCHEMA_VERSION = 1
_STEP_ROWS = 500
_HEADER_BYTES = 100


@dataclass(frozen=True, slots=True)
class RecordedTick:
    """One tick with its JSON parsed."""

    id: int
    run: str
    sequence: int
    at_unix_s: float
    policy_hash: str
    snapshot: Document
    decision: Document
    applied: Document | None
    confirmed: Document | None
    sentence: str | None
    notable: frozenset[str]


class JournalReader:
    """``ids`` and ``times`` of all readable ticks, in their order; ``damage`` describes the lost
    part.

    Raises ``ViewError`` when the file is not a journal or holds no tick.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ViewError(
                f"--journal: no file {path}; the daemon keeps journal.sqlite in its state_dir"
            )
        self._path = path
        self.damage: str | None = None
        self.ids: list[int] = []
        self.times: list[float] = []
        with ExitStack() as held:
            try:
                whole = held.enter_context(_made_whole(path))
                self._database = held.enter_context(closing(_open(whole)))
                self._check_version()
            except sqlite3.Error as error:
                raise ViewError(f"--journal: {path} is not a readable journal: {error}") from None
            self._read_index()
            self._require_ticks()
            self.moves = [self.times[one] for one in self._read_moves()]
            self._held = held.pop_all()

    def _require_ticks(self) -> None:
        if not self.ids:
            lost = f" ({self.damage})" if self.damage else ""
            raise ViewError(f"--journal: {self._path} holds no readable tick{lost}")

    def _check_version(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            raise ViewError(
                f"--journal: {self._path} has schema version {version}; this program reads "
                f"{SCHEMA_VERSION}"
            )

    def _read_index(self) -> None:
        last = -1
        while True:
            try:
                rows = self._database.execute(
                    "SELECT id, at_unix_s FROM ticks WHERE id > ? ORDER BY id LIMIT ?",
                    (last, _STEP_ROWS),
                ).fetchall()
            except sqlite3.DatabaseError as error:
                self._say_damaged(error)
                self._read_index_singly(last)
                return
            if not rows:
                return
            for number, at_unix_s in rows:
                self.ids.append(number)
                self.times.append(at_unix_s)
            last = rows[-1][0]

    def _read_index_singly(self, last: int) -> None:
        """Up to the first tick that cannot be read."""
        while True:
            try:
                row = self._database.execute(
                    "SELECT id, at_unix_s FROM ticks WHERE id > ? ORDER BY id LIMIT 1", (last,)
                ).fetchone()
            except sqlite3.DatabaseError:
                return
            if row is None:
                return
            last = row[0]
            self.ids.append(row[0])
            self.times.append(row[1])

    def _read_moves(self) -> Iterator[int]:
        """Places of ticks in which something notable happened."""
        try:
            for (number,) in self._database.execute(
                "SELECT DISTINCT tick_id FROM outcomes WHERE notable = 1 ORDER BY tick_id"
            ):
                place = bisect_right(self.ids, number) - 1
                if place >= 0 and self.ids[place] == number:
                    yield place
        except sqlite3.DatabaseError as error:
            self._say_damaged(error)

    def tick(self, place: int) -> RecordedTick | None:
        """By its place in ``ids``; ``None`` when it cannot be read."""
        try:
            row = self._database.execute(
                "SELECT id, run, sequence, at_unix_s, policy_hash, snapshot, decision, applied,"
                " confirmed, sentence FROM ticks WHERE id = ?",
                (self.ids[place],),
            ).fetchone()
            if row is None:
                return None
            number, run, sequence, at_unix_s, policy_hash, *texts, sentence = row
            snapshot, decision, applied, confirmed = (json.loads(text) for text in texts)
        except (sqlite3.DatabaseError, ValueError) as error:
            self._say_damaged(error)
            return None
        return RecordedTick(
            id=number,
            run=run,
            sequence=sequence,
            at_unix_s=at_unix_s,
            policy_hash=policy_hash,
            snapshot=snapshot,
            decision=decision,
            applied=applied,
            confirmed=confirmed,
            sentence=sentence,
            notable=self._notable(number),
        )

    def snapshot(self, place: int) -> Document | None:
        """Of one tick alone; ``None`` when it cannot be read."""
        try:
            row = self._database.execute(
                "SELECT snapshot FROM ticks WHERE id = ?", (self.ids[place],)
            ).fetchone()
            return None if row is None else parse_object(row[0])
        except (sqlite3.DatabaseError, ValueError) as error:
            self._say_damaged(error)
            return None

    def policy_at(self, at_unix_s: float) -> tuple[int, Document] | None:
        """The policy in force at a time with its number in the journal.

        ``None`` where nothing was kept: daemons before 0.2 kept the policy's hash only.
        """
        try:
            row = self._database.execute(
                "SELECT id, document FROM policies WHERE at_unix_s <= ? ORDER BY id DESC LIMIT 1",
                (at_unix_s,),
            ).fetchone()
            return None if row is None else (row[0], parse_object(row[1]))
        except sqlite3.OperationalError:
            return None  # no such table
        except (sqlite3.DatabaseError, ValueError) as error:
            self._say_damaged(error)
            return None

    def _notable(self, number: int) -> frozenset[str]:
        try:
            rows = self._database.execute(
                "SELECT lever FROM outcomes WHERE tick_id = ? AND notable = 1", (number,)
            ).fetchall()
        except sqlite3.DatabaseError as error:
            self._say_damaged(error)
            return frozenset()
        return frozenset(lever for (lever,) in rows)

    def place_at(self, at_unix_s: float) -> int:
        """The last tick at or before a time; -1 when there is none."""
        return bisect_right(self.times, at_unix_s) - 1

    def place_of(self, sequence: int, at_unix_s: float) -> int | None:
        """The tick of a flat decision."""
        place = self.place_at(at_unix_s + 0.001)
        found = self.tick(place) if place >= 0 else None
        return place if found is not None and found.sequence == sequence else None

    def events(self, begin_s: float, end_s: float, limit: int) -> list[Document]:
        """Those after ``begin_s`` up to ``end_s``, the newest ``limit``."""
        try:
            with closing(
                self._database.execute(
                    "SELECT sequence, at_unix_s, kind, actor, sentence FROM events"
                    " WHERE at_unix_s > ? AND at_unix_s <= ? ORDER BY id DESC LIMIT ?",
                    (begin_s, end_s, limit),
                )
            ) as rows:
                names = ("sequence", "at_unix_s", "kind", "actor", "sentence")
                return [dict(zip(names, row, strict=True)) for row in rows]
        except sqlite3.DatabaseError as error:
            self._say_damaged(error)
            return []

    def close(self) -> None:
        self._held.close()

    def _say_damaged(self, error: Exception) -> None:
        if self.damage is None:
            self.damage = f"damaged: {error}"


@contextmanager
def _made_whole(path: Path) -> Iterator[Path]:
    """The file, or, if its end is missing, a copy that has the length in its header.

    SQLite reads nothing of a file that is too short; of one with empty pages it reads the rest.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    page_bytes = int.from_bytes(header[16:18], "big")
    length = int.from_bytes(header[28:32], "big") * (65_536 if page_bytes == 1 else page_bytes)
    if not header.startswith(b"SQLite format 3") or path.stat().st_size >= length:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hisparsed-journal-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        with copy.open("r+b") as file:
            file.truncate(length)
        yield copy


def _open(path: Path) -> sqlite3.Connection:
    """Read-only; without its log where the folder cannot be written to."""
    uri = path.absolute().as_uri()
    database = sqlite3.connect(f"{uri}?mode=ro", uri=True, check_same_thread=False)
    try:
        database.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        database.close()
        database = sqlite3.connect(f"{uri}?immutable=1", uri=True, check_same_thread=False)
        database.execute("PRAGMA user_version").fetchone()
    return database
