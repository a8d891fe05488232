"""A journal's file, written as the daemon writes it, of the recorded node."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from recorded_node import recorded

BEGIN = 1_700_000_000.0
TICKS = 600


def write_journal(path: Path, ticks: int = TICKS) -> None:
    """One tick a second of the recorded node; the multiplier moves every hundred ticks."""
    from hisparsed.control.journal.store import _SCHEMA

    whole = recorded("tick")
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(f"{_SCHEMA} PRAGMA user_version = 1;")
        for at in range(ticks):
            moves = at % 100 == 50
            snapshot = {**whole["snapshot"], "tick": at}
            snapshot["tokens"] = {"prompt_total": at * 100, "generated_total": at * 10}
            decision = json.loads(json.dumps(whole["decision"])) | {"tick": at}
            applied = json.dumps(whole["applied"]) if moves else "null"
            confirmed: Any = {"tick": at - 1, "differences": []} if at % 100 == 51 else None
            database.execute(
                "INSERT INTO ticks VALUES (?, 'run', ?, ?, 'hash', ?, ?, ?, ?, NULL)",
                (at + 1, at + 1, BEGIN + at, json.dumps(snapshot), json.dumps(decision), applied,
                 json.dumps(confirmed)),
            )  # fmt: skip
            for lever in decision["levers"]:
                database.execute(
                    "INSERT INTO outcomes VALUES (?, ?, ?, ?)",
                    (at + 1, lever["lever"], lever["reason"], moves),
                )
        database.execute(
            "INSERT INTO events VALUES (1, 'run', 9999, ?, 'started', 'daemon', 'Started.')",
            (BEGIN + 10.5,),
        )
