"""The command around a soak: reads the trace first, shows progress, returns the result.

Progress is a bar on a terminal and a line now and then elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hisparsed.replay.trace import load_trace
from hisparsed.soak.daemon import DaemonRun, run_daemon_soak
from hisparsed.soak.result import SoakResult, SoakTotals
from hisparsed.soak.run import run_soak
from hisparsed.soak.settings import SoakSettings

_PLAIN_EVERY_S = 15.0

Show = Callable[[float, str], None]
"""How much is done, from 0 to 1, and the state in words."""


@contextmanager
def soak_display(out: TextIO, time_s: Callable[[], float]) -> Iterator[Show]:
    """A display on ``out``."""
    if not out.isatty():
        yield _plain_lines(out, time_s)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("soak"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=1.0)

        def show(done: float, state: str) -> None:
            bar.update(task, completed=min(1.0, done), description=state)

        yield show


def _plain_lines(out: TextIO, time_s: Callable[[], float]) -> Show:
    next_s = time_s()

    def show(_: float, state: str) -> None:
        nonlocal next_s
        if time_s() >= next_s:
            next_s = time_s() + _PLAIN_EVERY_S
            print(state, file=out, flush=True)

    return show


EXIT_INTERRUPTED = 130


def run_command(settings: SoakSettings, out: TextIO, *, daemon: bool = False) -> SoakResult:
    """Run a soak with progress on ``out``. Raises ``UserError`` for a trace that is wrong."""
    load_trace(settings.trace)
    print("Starting a daemon ..." if daemon else "Starting two engines ...", file=out, flush=True)
    began_s = time.monotonic()

    def share_done(moves: int) -> float:
        done = 0.0
        if settings.for_s is not None:
            done = (time.monotonic() - began_s) / settings.for_s
        if settings.max_moves is not None:
            done = max(done, moves / settings.max_moves)
        return done

    with soak_display(out, time.monotonic) as show:

        def tell(tally: SoakTotals) -> None:
            wrong = len(tally.violations) + tally.token_differences + tally.stuck
            show(
                share_done(tally.moves),
                f"{tally.requests:,} calls, {tally.moves:,} moves, {tally.steps:,} steps, "
                + (f"{wrong} WRONG" if wrong else "all sound"),
            )

        def tell_of_daemon(run: DaemonRun) -> None:
            show(
                share_done(run.values_set),
                f"{run.requests:,} calls, {run.values_set:,} values set, {run.stuck} without an "
                "answer",
            )

        if daemon:
            return run_daemon_soak(settings, tell_of_daemon)
        return run_soak(settings, tell)
