"""Builds a soak on real engines and runs it to its end; the thin shell around ``Soak``."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hisparsed.soak.engine import InProcessEngine, VirtualClock
from hisparsed.soak.oracle import Oracle
from hisparsed.soak.record import save_record
from hisparsed.soak.result import SoakResult
from hisparsed.soak.run import Soak
from hisparsed.soak.settings import MAX_MULTIPLIER, SoakSettings, node_config, oracle_config
from hisparsed.soak.tally import Tally, silent
from hisparsed.soak.traffic import Traffic


@contextmanager
def soak_on_engines(
    settings: SoakSettings, on_progress: Callable[[Tally], None] = silent
) -> Iterator[Soak]:
    """A soak that is ready to run, with both of its engines started (some seconds)."""
    clock = VirtualClock()
    with tempfile.TemporaryDirectory(prefix="hisparsed-soak-") as name:
        node = node_config(settings, Path(name) / "node")
        oracle = oracle_config(settings, Path(name) / "oracle")
        engine = InProcessEngine(node, max_multiplier=MAX_MULTIPLIER, clock=clock)
        try:
            witness = InProcessEngine(oracle, max_multiplier=MAX_MULTIPLIER, clock=VirtualClock())
            try:
                traffic = Traffic(
                    settings.trace,
                    seed=settings.seed,
                    clients=settings.clients,
                    cancel_share=settings.cancel_share,
                    max_model_len=node.reference.max_model_len,
                )
                yield Soak(
                    settings,
                    engine,
                    clock,
                    Oracle(witness),
                    traffic,
                    time.perf_counter,
                    time.thread_time,
                    on_progress=on_progress,
                )
            finally:
                witness.close()
        finally:
            engine.close()


def run_soak(
    settings: SoakSettings,
    on_progress: Callable[[Tally], None] = silent,
    *,
    record_folder: Path | None = None,
) -> SoakResult:
    """Run one soak. Ctrl-C ends it early, with the result so far.

    A soak that is not clean leaves a record in ``record_folder``; so does one that an
    exception of the engine ends, which is raised on with the place of the record.
    """
    with soak_on_engines(settings, on_progress) as soak, _stopped_by_interrupt(soak):
        began_s = time.perf_counter()
        try:
            soak.run()
        except Exception as error:
            error.add_note(f"The record of this soak is in {save_record(soak, record_folder)}.")
            raise
        seconds = time.perf_counter() - began_s
        record = None if soak.clean else str(save_record(soak, record_folder))
        return soak.tally.result(
            settings,
            seconds=seconds,
            verified=soak.oracle.verified,
            cancels=soak.traffic.cancels,
            reconnects=soak.traffic.reconnects,
            interrupted=soak.stop,
            record=record,
        )


@contextmanager
def _stopped_by_interrupt(soak: Soak) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        soak.stop = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
