"""The command around a soak: reads the trace first, shows progress, hands back the result."""

from __future__ import annotations

import time
from typing import TextIO

from hisparsed.replay.trace import load_trace
from hisparsed.soak.daemon import DaemonRun
from hisparsed.soak.daemon_session import run_daemon_soak
from hisparsed.soak.display import soak_display
from hisparsed.soak.result import SoakResult
from hisparsed.soak.session import run_soak
from hisparsed.soak.settings import SoakSettings
from hisparsed.soak.tally import Tally

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

        def tell(tally: Tally) -> None:
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
