"""What the view costs: first paint, CPU at one status a second, memory over an hour of journal.

`python -m hisparsed.tui.bench [--json]`. Runs without a terminal and without a node: requests,
history and journal are made up, in sizes of a busy node. Not a test; figures are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.bench_work import (
    made_up_history,
    made_up_requests,
    made_up_status,
    snapshot_of_a_busy_node,
    write_journal,
)
from hisparsed.tui.journal_player import JournalPlayer
from hisparsed.tui.journal_reader import JournalReader
from hisparsed.tui.model import NodeModel
from hisparsed.tui.session import NodeSession
from hisparsed.tui.wire import Document

_PAINTS = 5
_FIRST_PAINT = """
import asyncio, sys
from hisparsed.tui.bench import first_paint
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
        self._tell(updates.HistoryNews(made_up_history(begin)))
        for second in range(self._seconds):
            self._tell(updates.StatusNews(made_up_status(begin + second, second)))
            self._tell(updates.RequestNews(made_up_requests(self._random)))
            await asyncio.sleep(1.0)

    async def tick(self, entry: Document) -> Document:
        return entry

    def refresh_requests(self) -> None:
        """Comes by itself."""

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
    """The best of a few, each in a new process, beside importing Textual alone."""
    paint = min(_seconds_of(_FIRST_PAINT) for _ in range(_PAINTS))
    textual = min(_seconds_of("import textual") for _ in range(_PAINTS))
    return {
        "first_paint_s": round(paint, 3),
        "import_textual_s": round(textual, 3),
        "first_paint_ratio": round(paint / textual, 2),
    }


def _seconds_of(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)  # noqa: S603
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
    parser = argparse.ArgumentParser(prog="python -m hisparsed.tui.bench", description=__doc__)
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
