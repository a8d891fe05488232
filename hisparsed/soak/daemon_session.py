"""Starts a daemon, soaks it, reads its journal, and verifies the answers afterwards."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hisparsed.config.node import NodeConfig
from hisparsed.config.reference import ReferenceConfig
from hisparsed.control.journal_store import FILE_NAME
from hisparsed.control.records import APPLIED_JSON, Applied
from hisparsed.demo.node_process import DemoNode
from hisparsed.demo.settings import DemoSettings
from hisparsed.soak.daemon import DaemonRun, DaemonSoak, demo_settings
from hisparsed.soak.engine import InProcessEngine, VirtualClock
from hisparsed.soak.oracle import Difference, Oracle, Sample
from hisparsed.soak.record import save_document
from hisparsed.soak.result import SoakResult
from hisparsed.soak.settings import MAX_MULTIPLIER, SoakSettings
from hisparsed.soak.tally import Tally
from hisparsed.soak.traffic import Traffic

_BROKEN = "host ledger broke"
"""How the engine says that a command was refused for a violation."""


def run_daemon_soak(
    settings: SoakSettings,
    on_progress: Callable[[DaemonRun], None],
    *,
    record_folder: Path | None = None,
) -> SoakResult:
    """Run one soak of a daemon. Ctrl-C ends it early, with the result so far.

    Raises ``UserError`` when the daemon does not start or does not last.
    """
    demo = demo_settings(settings)
    traffic = Traffic(
        settings.trace,
        seed=settings.seed,
        clients=settings.clients,
        cancel_share=settings.cancel_share,
        max_model_len=demo.max_model_len,
    )
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hisparsed-soak-") as name:
        folder = Path(name)
        with DemoNode(demo, folder / "node", "act") as node:
            soak = DaemonSoak(settings, node, traffic, on_progress)
            run = asyncio.run(soak.run())
        applied = applied_commands(folder / "node" / "state" / FILE_NAME)
        differences = verify(demo, run.samples, folder / "oracle")
    tally = tally_of(run, applied)
    tally.token_differences = len(differences)
    wrong = tally.violations or differences or run.stuck
    document = {
        "seed": settings.seed,
        "violations": tally.violations,
        "errors": run.errors,
        "differences": differences,
        "applied": applied,
    }
    result = tally.result(
        settings,
        seconds=time.monotonic() - began_s,
        verified=len(run.samples),
        cancels=traffic.cancels,
        reconnects=traffic.reconnects,
        interrupted=soak.stop.is_set(),
        record=str(save_document(document, record_folder)) if wrong else None,
    )
    observed = run.statuses[-1].observed if run.statuses else None
    if observed is None:
        return result
    preemptions, steps = observed.requests.preemptions_total, observed.engine.steps
    hits = observed.serving.prefix_hit_tokens_total
    return replace(result, preemptions=preemptions, steps=steps, prefix_hit_tokens=hits)


def applied_commands(journal: Path) -> list[Applied]:
    """What the control loop told the engine, oldest first, and what came of it."""
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT applied FROM ticks WHERE applied != 'null' ORDER BY id")
        found = [APPLIED_JSON.validate_json(text) for (text,) in rows]
    return [one for one in found if one is not None]


def tally_of(run: DaemonRun, applied: list[Applied]) -> Tally:
    """The counts of a soak, from the client's side and the journal's."""
    tally = Tally(requests=run.requests, stuck=run.stuck, moves=len(applied))
    tally.moves_refused = sum(one.error is not None for one in applied)
    tally.violations = [one.error for one in applied if one.error and _BROKEN in one.error]
    tally.move_us = [one.result.apply_us for one in applied if one.result is not None]
    tally.gaps_moving_s, tally.gaps_quiet_s = run.gaps_moving_s, run.gaps_quiet_s
    for status in run.statuses:
        observed = status.observed
        if observed is None:
            continue
        tally.reports += 1
        tally.report_us.append(observed.engine.report_cost_s * 1e6)
        tally.pending_seen += observed.pools.pending_bytes > 0
        tally.draining_seen += observed.pools.draining_bytes > 0
        for name in ("full", "mixed", "none"):
            if getattr(observed.requests, name):
                tally.residency.add(name)
    return tally


def verify(demo: DemoSettings, samples: list[Sample], folder: Path) -> list[Difference]:
    """Which samples an untouched engine of the daemon's model answers differently."""
    config = NodeConfig(
        node="reference",
        host_budget=64 << 20,
        reference=ReferenceConfig(
            gpu_blocks=4000,
            max_model_len=demo.max_model_len,
            max_num_batched_tokens=demo.max_num_batched_tokens,
            seed=demo.seed,
        ),
        state_dir=folder,
    )
    engine = InProcessEngine(config, max_multiplier=MAX_MULTIPLIER, clock=VirtualClock())
    try:
        oracle = Oracle(engine)
        found = [difference for sample in samples for difference in oracle.take(sample)]
        return found + oracle.settle()
    finally:
        engine.close()
