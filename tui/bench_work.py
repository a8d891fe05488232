"""Made-up nodes for ``bench``: documents and a journal in the sizes of a busy node.

Numbers mean nothing; their count and width are what matters.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

from hisparsed.tui.history import COLUMNS
from hisparsed.tui.wire import Document

REQUESTS = 200
_HISTORY_S = 7_200
_SCHEMA = """
CREATE TABLE ticks (
    id INTEGER PRIMARY KEY, run TEXT, sequence INTEGER, at_unix_s REAL, policy_hash TEXT,
    snapshot TEXT, decision TEXT, applied TEXT, confirmed TEXT, sentence TEXT);
CREATE TABLE outcomes (tick_id INTEGER, lever TEXT, code TEXT, notable INTEGER);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, run TEXT, sequence INTEGER, at_unix_s REAL, kind TEXT, actor TEXT,
    sentence TEXT);
"""


def made_up_status(at_unix_s: float, count: int) -> Document:
    pool = {"target_bytes": 7e11, "capacity_bytes": 7e11, "in_use_bytes": 4e11 + count * 1e8,
            "cached_bytes": 2e11, "reach_tokens": 5_000_000 + count}  # fmt: skip
    levers = [
        {"lever": lever, "mode": "act", "current": 1.0, "wanted": 1.0, "reason": "InDeadBand",
         "sentence": f"Keep {lever} where it is, because nothing speaks for a move."}
        for lever in ("split", "multiplier", "admission", "watermark")
    ]  # fmt: skip
    return {
        "at_unix_s": at_unix_s,
        "node": {"kind": "cuda", "model": "GLM", "version": "1", "started_unix_s": 1_699_000_000},
        "lifecycle": "serving",
        "observed": {
            "engine": {"report_age_s": 0.1, "report_cost_s": 0.0002},
            "pools": {"budget_bytes": 14e11, "host_block_bytes": 3e6, "hisparse": pool,
                      "offload": pool, "pending_bytes": 0, "draining_bytes": 0},
            "sessions": {"live": 300, "live_set_tokens": 9_000_000, "coverage": 1.2},
            "requests": {"running": REQUESTS, "waiting": count % 9, "full": 20, "mixed": 120,
                         "none": 60, "finished_total": count * 3, "preemptions_total": 0},
            "hot": {"multiplier": 2.0, "hits_total": count * 90_000, "loads_total": count * 9_000,
                    "h2d_bytes_total": count * 2e9, "miss_curve": []},
            "gpu": {"total_blocks": 60_000, "free_blocks": 9_000 + count % 50,
                    "resident_blocks": 20_000, "hot_blocks": 18_000},
            "serving": {"generated_tokens_total": count * 2_000 + count % 7 * 100,
                        "prompt_tokens_total": count * 90_000, "ttft_sum_s": count * 2.0,
                        "ttft_count": count * 3, "itl_sum_s": count * 9.0, "itl_count": count * 300,
                        "prefix_query_tokens_total": count * 90_000,
                        "prefix_hit_tokens_total": count * 81_000},
        },
        "levers": levers,
        "policy": {"generation": 1, "mode": "act", "frozen": []},
        "loop": {"tick": count, "tick_s": 1.0, "last_tick_s": 0.02},
        "journal": {"writing": True, "written": count, "dropped": 0},
    }  # fmt: skip


def made_up_history(end_unix_s: float) -> Document:
    rows = []
    for back in range(_HISTORY_S, 0, -5):
        passed = float(_HISTORY_S - back)
        rows.append([end_unix_s - back, *(passed * (1 + at) for at in range(len(COLUMNS)))])
    return {"columns": ["at_unix_s", *COLUMNS], "rows": rows}


def made_up_requests(chance: random.Random) -> Document:
    rows = [
        {"request_id": f"cmpl-{index:016x}-0-{index:08x}", "state": "running",
         "residency": "mixed", "context_tokens": chance.randrange(9_000, 200_000),
         "resident_share": chance.random(), "hot_rows": chance.randrange(4_096),
         "hot_capacity_rows": 4_096, "hits": chance.randrange(10**7),
         "loads": chance.randrange(10**6), "age_s": chance.random() * 900}
        for index in range(REQUESTS)
    ]  # fmt: skip
    return {"rows": rows, "running": REQUESTS, "waiting": 0, "omitted": 0, "took_us": 900.0}


def write_journal(path: Path, snapshot: Document, seconds: int) -> None:
    """A journal of one tick a second in the daemon's form."""
    decision = {"tick": 0, "policy_generation": 1, "levers": [
        {"lever": lever, "current": 1.0, "wanted": 1.0, "reason": "InDeadBand",
         "cause": "InDeadBand", "limited_by": None, "figures": {"free_ratio": 0.2},
         "sentence": "Keep it."} for lever in ("split", "multiplier", "admission", "watermark")
    ]}  # fmt: skip
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA user_version = 1")
        database.executescript(_SCHEMA)
        for second in range(seconds):
            decision["tick"] = second
            row = (second + 1, "run", second + 1, 1_700_000_000.0 + second, "hash",
                   json.dumps({**snapshot, "tick": second}), json.dumps(decision), "null", "null",
                   None)  # fmt: skip
            database.execute("INSERT INTO ticks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if second % 20 == 0:
                database.execute(
                    "INSERT INTO outcomes VALUES (?, 'split', 'InDeadBand', 1)", (second + 1,)
                )


def snapshot_of_a_busy_node() -> Document:
    """As large as a real one; what pages read of it is in."""
    return {
        "at_s": 1.0,
        "geometry": {"block_tokens": 64, "host_block_bytes": 3_200_000, "budget_blocks": 480_000,
                     "offload_chunk_tokens": 64, "offload_chunk_bytes": 180_000,
                     "offload_copies": 1, "chunks_per_host_block": 17},
        "hisparse": {"capacity_blocks": 450_000, "target_blocks": 450_000,
                     "in_use_blocks": 300_000, "cached_blocks": 140_000},
        "offload": {"capacity_chunks": 510_000, "target_blocks": 30_000, "lent_blocks": 30_000,
                    "in_use_chunks": 40, "stored_chunks": 400_000},
        "pending_blocks": 0, "draining_blocks": 0,
        "gpu": {"total_blocks": 60_000, "free_blocks": 9_000, "waiting_for_blocks": False},
        "requests": {"running": 80, "waiting": 3, "full": 5, "mixed": 60, "none": 15,
                     "preemptions_total": 4, "finished_total": 9_000},
        "hot": {"multiplier": 2.0, "hits_total": 10**9, "loads_total": 10**8,
                "h2d_bytes_total": 10**12,
                "predicted": [{"multiplier": 1.0, "miss_fraction": 0.3}]},
        "sessions": {"live_set_tokens": 9_000_000, "live_sessions": 300},
        "prefix": {"hit_tokens_total": 10**9, "query_tokens_total": 11**9},
        "tokens": {"prompt_total": 11**9, "generated_total": 10**8},
        "filler": ["x" * 40] * 30,
    }  # fmt: skip
