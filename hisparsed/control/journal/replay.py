"""Recorded journals: read like a running node, or decided with another policy.

Any node's recording is accepted, also a simulated one's. A recording does not react: where the
other policy would have moved, the next snapshot still shows the node as it was. So the first
difference is exact and later ones are only hints. Reads only.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from hisparsed.control.journal.records import DECISION_JSON, SNAPSHOT_JSON, DecisionView, EventView
from hisparsed.control.journal.store import FILE_NAME, Query, open_copy, read_decisions, read_events
from hisparsed.errors import UserError
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Decision, LeverDecision
from hisparsed.policy.effective import CheckedPolicy, pressure_now
from hisparsed.policy.memory import Memory
from hisparsed.policy.schedules import Pressure
from hisparsed.policy.signals import Lever, Snapshot

_OTHER_RUN = ""
"""The id of no run, so that no record of the file is omitted."""


class RecordedJournal:
    """``path`` is a journal or its folder. Raises ``UserError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = path / FILE_NAME if path.is_dir() else path
        if not self._file.is_file():
            raise UserError(
                f"--journal: there is no file {self._file}; name a journal.sqlite or its folder"
            )
        newest = self.decisions(limit=1)
        self.end_unix_s = newest[0].at_unix_s if newest else 0.0
        """When the recording ends; 0 for an empty one."""

    def decisions(
        self,
        *,
        limit: int,
        lever: str | None = None,
        code: str | None = None,
        since: float | None = None,
        notable: bool = False,
    ) -> list[DecisionView]:
        """Newest first."""
        query = Query(limit, since, None if lever is None else Lever(lever), code, notable)
        try:
            return list(read_decisions(self._file, query, run=_OTHER_RUN, before=0))
        except sqlite3.Error as error:
            raise UserError(f"{self._file} cannot be read as a journal: {error}") from None

    def journal_events(self, limit: int) -> list[EventView]:
        """Newest first."""
        try:
            return read_events(self._file, limit, run=_OTHER_RUN, before=0)
        except sqlite3.Error as error:
            raise UserError(f"{self._file} cannot be read as a journal: {error}") from None


@dataclass(frozen=True, slots=True)
class Tick:
    """One recorded tick; ``run`` distinguishes one run of the daemon from another."""

    run: str
    at_unix_s: float
    snapshot: Snapshot
    decision: Decision


@dataclass(frozen=True, slots=True)
class Parting:
    """One lever for which the policies decide differently, in the same way for some ticks."""

    at_unix_s: float
    """Of the first of these ticks."""
    tick: int
    lever: Lever
    current: float | str
    recorded: str
    """Reason code."""
    recorded_wanted: float | str
    replayed: str
    replayed_wanted: float | str
    sentence: str
    """The other policy's sentence in the first of these ticks."""
    ticks: int = 1
    last_unix_s: float = 0.0
    """Of the last of these ticks."""

    def goes_on(self, other: Parting) -> bool:
        """Whether ``other``, of the same lever and the next tick, is the same difference."""
        return self._decided == other._decided

    @property
    def _decided(self) -> tuple[float | str, ...]:
        return (self.recorded, self.recorded_wanted, self.replayed, self.replayed_wanted)


@dataclass(frozen=True, slots=True)
class LeverReplay:
    """One lever over all ticks; reasons count ticks."""

    parted: int
    recorded_moves: int
    replayed_moves: int
    recorded_reasons: dict[str, int]
    replayed_reasons: dict[str, int]
    recorded_last: float | str
    """The value that it wanted in the last tick."""
    replayed_last: float | str


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    ticks: int
    unreadable: int
    """Ticks skipped, since their record cannot be read."""
    runs: int
    begin_unix_s: float
    end_unix_s: float
    parted: int
    """Ticks in which the decisions on at least one lever differ."""
    first: tuple[Parting, ...]
    levers: dict[Lever, LeverReplay]


def replay_journal(
    path: Path, policy: CheckedPolicy, *, last_s: float | None = None, first: int = 10
) -> Replay:
    """Replay a journal file, or the one in a state folder; any node's is accepted.

    ``last_s`` takes only the end of the recording, ``first`` is how many differences are kept, each
    of as many ticks as it lasts. Raises ``UserError`` when there is no
    recording to read.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: there is no such journal; name a journal.sqlite or its folder")
    try:
        with closing(open_copy(file)) as database:
            return _replay(database, policy, last_s, first)
    except sqlite3.Error as error:
        raise UserError(f"{file} cannot be read as a journal: {error}") from None
    except _NothingRecordedError:
        raise UserError(f"{file} holds no ticks to replay") from None


class _NothingRecordedError(Exception):
    pass


def _replay(
    database: sqlite3.Connection, policy: CheckedPolicy, last_s: float | None, first: int
) -> Replay:
    total, unreadable, parted = 0, 0, 0
    runs: set[str] = set()
    shown = _Shown(first)
    tallies = {lever: _Tally() for lever in Lever}
    memory, pressure, run, number = Memory(), Pressure.LOW, None, 0
    begin = end = 0.0
    for tick in _ticks(database, last_s):
        if tick is None:
            unreadable += 1
            continue
        # Ticks of one run start at 1 with each engine, and its policy starts without a memory.
        if tick.run != run or tick.decision.tick <= number:
            memory, pressure, run = Memory(), Pressure.LOW, tick.run
            runs.add(tick.run)
        number = tick.decision.tick
        begin, end = (begin if total else tick.at_unix_s), tick.at_unix_s
        total += 1
        effective = policy.variants[policy.active(tick.at_unix_s, pressure)]
        decision, memory = decide(effective, tick.snapshot, memory)
        pressure = pressure_now(policy.loaded.value, tick.snapshot, pressure)
        differing = {
            old.lever: _parting(tick, old, new)
            for old in tick.decision.levers
            if tallies[old.lever].take(old, new := decision.of(old.lever))
        }
        parted += bool(differing)
        shown.take(differing)
    if not total:
        raise _NothingRecordedError
    levers = {lever: tally.result() for lever, tally in tallies.items() if tally.seen}
    return Replay(total, unreadable, len(runs), begin, end, parted, tuple(shown.partings), levers)


def _ticks(database: sqlite3.Connection, last_s: float | None) -> Iterator[Tick | None]:
    """Ticks in order of time; ``None`` for one that cannot be read."""
    rows = database.execute(
        "SELECT run, at_unix_s, snapshot, decision FROM ticks"
        " WHERE at_unix_s >= (SELECT MAX(at_unix_s) FROM ticks) - ? ORDER BY id",
        (last_s if last_s is not None else float("inf"),),
    )
    for run, at_unix_s, snapshot, decision in rows:
        try:
            yield Tick(
                run,
                at_unix_s,
                SNAPSHOT_JSON.validate_json(snapshot),
                DECISION_JSON.validate_json(decision),
            )
        except ValidationError:
            yield None


def _parting(tick: Tick, old: LeverDecision, new: LeverDecision) -> Parting:
    return Parting(
        at_unix_s=tick.at_unix_s,
        tick=tick.decision.tick,
        lever=old.lever,
        current=old.current,
        recorded=old.reason.value,
        recorded_wanted=old.wanted,
        replayed=new.reason.value,
        replayed_wanted=new.wanted,
        sentence=new.sentence,
        last_unix_s=tick.at_unix_s,
    )


class _Shown:
    """The first ``most`` differences; one that continues in the next tick is counted once."""

    def __init__(self, most: int) -> None:
        self.partings: list[Parting] = []
        self._most = most
        self._last: dict[Lever, tuple[Parting, int | None]] = {}
        """Each lever's difference in the last tick, and its place in ``partings``."""

    def take(self, differing: Mapping[Lever, Parting]) -> None:
        before, self._last = self._last, {}
        for lever, one in differing.items():
            last, place = before.get(lever, (None, None))
            if last is None or not last.goes_on(one):
                place = len(self.partings) if len(self.partings) < self._most else None
                if place is not None:
                    self.partings.append(one)
            elif place is not None:
                whole = self.partings[place]
                self.partings[place] = replace(
                    whole, ticks=whole.ticks + 1, last_unix_s=one.at_unix_s
                )
            self._last[lever] = (one, place)


class _Tally:
    """Counts one lever's decisions of both policies."""

    def __init__(self) -> None:
        self._old: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        self._parted = self._old_moves = self._new_moves = 0
        self._last: tuple[LeverDecision, LeverDecision] | None = None

    @property
    def seen(self) -> bool:
        return self._last is not None

    def take(self, old: LeverDecision, new: LeverDecision) -> bool:
        """Count one tick; returns whether the decisions differ."""
        self._last = old, new
        self._old[old.reason.value] += 1
        self._new[new.reason.value] += 1
        self._old_moves += old.acts
        self._new_moves += new.acts
        parts = (old.reason, old.wanted) != (new.reason, new.wanted)
        self._parted += parts
        return parts

    def result(self) -> LeverReplay:
        assert self._last is not None  # noqa: S101 (only asked when something was taken)
        old, new = self._last
        return LeverReplay(
            parted=self._parted,
            recorded_moves=self._old_moves,
            replayed_moves=self._new_moves,
            recorded_reasons=dict(self._old.most_common()),
            replayed_reasons=dict(self._new.most_common()),
            recorded_last=old.wanted,
            replayed_last=new.wanted,
        )
