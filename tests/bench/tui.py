"""What the view costs: first paint, CPU at one status a second, memory over an hour of journal.

`python -m tests.bench.tui [--json]`. Runs without a terminal and without a node: documents, history
and journal are made up, in sizes of a busy node; their numbers mean nothing. Not a test; figures
are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from hisparsed.policy.derived import HISTORY
from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.feed import NodeSession
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
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
            "report_age_s": 0.1, "report_cost_s": 0.0002,
            "geometry": {"host_block_bytes": 3e6},
            "sessions": {"live_sessions": 300, "live_set_tokens": 9_000_000},
            "requests": {"running": REQUESTS, "waiting": count % 9, "full": 20, "mixed": 120,
                         "none": 60, "finished_total": count * 3, "preemptions_total": 0},
            "hot": {"multiplier": 2.0, "hits_total": count * 90_000, "loads_total": count * 9_000,
                    "h2d_bytes_total": count * 2e9, "predicted": [], "leased_blocks": 18_000},
            "gpu": {"total_blocks": 60_000, "free_blocks": 9_000 + count % 50,
                    "resident_blocks": 20_000},
            "tokens": {"generated_total": count * 2_000 + count % 7 * 100,
                       "prompt_total": count * 90_000},
            "latencies": {"ttft_sum_s": count * 2.0, "ttft_count": count * 3,
                          "itl_sum_s": count * 9.0, "itl_count": count * 300},
            "prefix": {"query_tokens_total": count * 90_000, "hit_tokens_total": count * 81_000},
        },
        "derived": {
            "coverage": 1.2,
            "pools": {"budget_bytes": 14e11, "hisparse": pool, "offload": pool,
                      "pending_bytes": 0, "draining_bytes": 0},
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
        rows.append([end_unix_s - back, *(passed * (1 + at) for at in range(len(HISTORY)))])
    return {"columns": ["at_unix_s", *HISTORY], "rows": rows}


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


_PAINTS = 5
_FIRST_PAINT = """
import asyncio, sys
from tests.bench.tui import first_paint
asyncio.run(first_paint())
"""


class MadeUpFeed:
    """One status a second of a node with many requests, for ``seconds``."""

    def __init__(self, tell: Any, seconds: int) -> None:
        self.want_requests = False
        self._tell = tell
        self._seconds = seconds
        self._random = random.Random(7)

    async def run(self) -> None:
        begin = 1_700_000_000.0
        self._tell(updates.Connected())
        self._tell(updates.HistoryUpdate(made_up_history(begin)))
        for second in range(self._seconds):
            self._tell(updates.StatusUpdate(made_up_status(begin + second, second)))
            self._tell(updates.RequestUpdate(made_up_requests(self._random)))
            await asyncio.sleep(1.0)

    async def tick(self, entry: Document) -> Document:
        return entry

    def refresh_requests(self) -> None:
        """Arrives unasked."""

    def refresh_policy(self) -> None:
        """There is none."""

    def refresh_decisions(self, lever: str | None, code: str | None) -> None:
        """There are none."""


def made_up_app(seconds: int) -> TopApp:
    model = NodeModel("bench")
    return TopApp([NodeSession(model, lambda tell: MadeUpFeed(tell, seconds))])


async def first_paint() -> None:
    """Start the application without a terminal and leave once a status is on the screen."""
    app = made_up_app(1)
    async with app.run_test(size=(120, 40)) as pilot:
        while app.sessions[0].model.status is None:
            await pilot.pause()
        app.draw()
        await pilot.pause()


def time_first_paint() -> dict[str, float]:
    """The best of a few, each in a new process, compared with importing Textual alone."""
    paint = min(_seconds_of(_FIRST_PAINT) for _ in range(_PAINTS))
    textual = min(_seconds_of("import textual") for _ in range(_PAINTS))
    return {
        "first_paint_s": round(paint, 3),
        "import_textual_s": round(textual, 3),
        "first_paint_ratio": round(paint / textual, 2),
    }


def _seconds_of(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - began


async def measure_cpu(page: str, seconds: int, size: tuple[int, int]) -> float:
    """CPU seconds a second while ``page`` is shown and a status comes every second."""
    app = made_up_app(seconds + 10)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(1.0)
        await pilot.press(page)
        await pilot.pause(1.0)
        began, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (time.process_time() - began) / (time.perf_counter() - wall)


async def measure_memory(journal: Path, hours: float) -> list[float]:
    """Resident MiB at the end of each sixth of ``hours`` of journal, played as fast as it goes."""
    reader = JournalReader(journal)
    model = NodeModel("bench")
    player = JournalPlayer(reader, clock=time.monotonic)
    player.playing = False
    app = TopApp([NodeSession(model, player.start, player=player)])
    samples = []
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.5)
        player.playing = True
        for _ in range(6):
            for _ in range(round(hours * 3600 / 6 / 5)):
                player.advance(5.0)
                app.draw()
                await pilot.pause()
            samples.append(round(_resident_mib(), 1))
    reader.close()
    return samples


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tui", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=int, default=15, help="for each CPU figure")
    asked = parser.parse_args()
    figures: dict[str, Any] = time_first_paint()
    for name, page in (("overview", "1"), ("requests", "3")):
        share = asyncio.run(measure_cpu(page, asked.seconds, (120, 40)))
        figures[f"cpu_share_{name}"] = round(share, 4)
    figures["cpu_share_overview_200x60"] = round(
        asyncio.run(measure_cpu("1", asked.seconds, (200, 60))), 4
    )
    with tempfile.TemporaryDirectory(prefix="hisparsed-bench-") as folder:
        journal = Path(folder) / "journal.sqlite"
        # Three hours, so that the window of two hours is full before memory is looked at.
        write_journal(journal, snapshot_of_a_busy_node(), 3 * 3_600)
        samples = asyncio.run(measure_memory(journal, 3.0))
    figures["resident_mib_every_half_hour"] = samples
    if asked.json:
        print(json.dumps(figures))  # noqa: T201 (the result)
        return
    for name, value in figures.items():
        print(f"{name:32} {value}")  # noqa: T201 (the result)


if __name__ == "__main__":
    main()
