"""One tick of the journal whole: decision, snapshot, what was applied and what came of it.

Looks in memory first, then in the file. For people who ask why; the flat entries of many
ticks are the journal's own reading.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from hisparsed.control.records import (
    APPLIED_JSON,
    CONFIRMATION_JSON,
    DECISION_JSON,
    SNAPSHOT_JSON,
    TickRecord,
)

EFFECT_S = 60.0
"""How long after a tick its effect is looked at."""

_SAME_TIME_S = 0.001
_CONFIRMED_WITHIN = 5
_COLUMNS = "sequence, at_unix_s, policy_hash, decision, applied, confirmed, snapshot, sentence, run"


def in_memory(
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


def in_file(
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
