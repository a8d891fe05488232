"""The command around a soak: reads the trace first, shows progress, hands back the result."""

from __future__ import annotations

import time
from typing import TextIO

from hisparsed.replay.trace import load_trace
from hisparsed.soak.display import soak_display
from hisparsed.soak.result import SoakResult
from hisparsed.soak.session import run_soak
from hisparsed.soak.settings import SoakSettings
from hisparsed.soak.tally import Tally

EXIT_INTERRUPTED = 130


def run_command(settings: SoakSettings, out: TextIO) -> SoakResult:
    """Run a soak with progress on ``out``. Raises ``UserError`` for a trace that is wrong."""
    load_trace(settings.trace)
    print("Starting two engines ...", file=out, flush=True)
    began_s = time.monotonic()

    def share_done(tally: Tally) -> float:
        done = 0.0
        if settings.for_s is not None:
            done = (time.monotonic() - began_s) / settings.for_s
        if settings.max_moves is not None:
            done = max(done, tally.moves / settings.max_moves)
        return done

    with soak_display(out, time.monotonic, share_done) as show:
        return run_soak(settings, show)
