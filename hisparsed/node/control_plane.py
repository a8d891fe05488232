"""Builds the control plane of one node: everything around the control loop, none of it started.

One place that knows which part needs which; ``node`` starts and stops them in order. Also shows the
GPUs of a CUDA node in its status and its events, as long as the daemon lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from hisparsed import __version__
from hisparsed.canary.api import CanaryApi
from hisparsed.canary.round import CanaryEngine
from hisparsed.canary.watch import CanaryWatch
from hisparsed.config.machine import NodeKind, machine_memory_bytes
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.engine import EngineApi
from hisparsed.control.api.views import ApiViews
from hisparsed.control.background import Background
from hisparsed.control.doctor import Doctor, DoctorApi, DoctorWatch
from hisparsed.control.events import Announcer, Broadcast
from hisparsed.control.file_watch import NodeFile, Watched
from hisparsed.control.holds import Overrides
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.store import Retention
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.loop import ControlLoop
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.operator import Operator, restore_overrides
from hisparsed.control.state_files import TargetFile
from hisparsed.control.status.current import Board
from hisparsed.control.status.document import NodeInfo
from hisparsed.control.status.history import History
from hisparsed.control.watch import GpuEvents, StateWatch
from hisparsed.engine.cuda.nvml import EVERY_S, GpuReader, GpuWatch, nvidia_library
from hisparsed.engine.port import EnginePort
from hisparsed.logs.ring import LogRing
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.signals import Admission

log = logging.getLogger("hisparsed.daemon")


@dataclass(frozen=True)
class ControlParts:
    """The control side, wired. ``loop`` needs an engine, so it comes from ``make_loop``."""

    source: PolicySource
    overrides: Overrides
    broadcast: Broadcast
    journal: Journal
    announcer: Announcer
    metrics: ControlMetrics
    board: Board
    operator: Operator
    views: ApiViews
    api: ControlApi
    targets: TargetFile
    canary_api: CanaryApi
    engine_api: EngineApi
    node_file: NodeFile
    state_dir: Path
    background: Background
    watched: tuple[Watched, ...]
    """The policy and the node's document."""

    def make_loop(
        self, engine: EnginePort, set_admission: Callable[[Admission], None]
    ) -> ControlLoop:
        return ControlLoop(
            engine,
            self.source,
            self.overrides,
            self.journal,
            self.announcer,
            self.metrics,
            self.board,
            clock=time.monotonic,
            wall_clock=time.time,
            sleep=asyncio.sleep,
            set_admission=set_admission,
            targets=self.targets,
        )

    def now_runs(self, config: NodeConfig) -> None:
        """An engine serves with ``config``; the document is compared with that from now on."""
        self.node_file.now_runs(config)

    def start_canary(self, engine: CanaryEngine) -> CanaryWatch:
        """The canary of an engine that serves, in status and API from now on."""
        watch = CanaryWatch(
            engine,
            self.overrides,
            self.announcer,
            self.journal,
            self.state_dir,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.board.canary = watch.status
        self.board.watchers.append(watch.watch)
        self.canary_api.watch = watch
        return watch


def build_control(
    config: NodeConfig,
    source: PolicySource,
    kind: str,
    model: str,
    document: Path,
    doctor: Doctor,
) -> ControlParts:
    """Wire the control side of a node; reads what operators had set, and no other file."""
    run = uuid4().hex
    writer = JournalWriter(
        config.state_dir,
        run=run,
        clock=time.monotonic,
        stamp=lambda: datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
        log=log.warning,
        retention=Retention(config.journal.max_ticks, config.journal.max_size),
    )
    node = NodeInfo(
        kind=kind,
        model=model,
        version=__version__,
        api_url=f"http://{config.api.host}:{config.api.port}",
        pid=os.getpid(),
        started_unix_s=time.time(),
    )
    overrides = Overrides()
    broadcast = Broadcast()
    journal = Journal(writer, run=run)
    announcer = Announcer(journal, broadcast, wall_clock=time.time)
    metrics = ControlMetrics()
    board = Board(
        node, source, overrides, journal, broadcast, clock=time.monotonic, wall_clock=time.time
    )
    metrics.bind(board.status)
    restore_overrides(source, announcer, config.state_dir)
    operator = Operator(source, overrides, announcer, wall_clock=time.time)

    def tell(pending: tuple[PendingRestart, ...]) -> None:
        board.node_pending = pending

    node_file = NodeFile(document, config, announcer, load=load_again, tell=tell)
    views = ApiViews(journal, broadcast, LogRing(), History())
    board.watchers.append(views.watch)
    canary_api, engine_api = CanaryApi(), EngineApi()
    targets = TargetFile(config.state_dir)
    state_watch = StateWatch(
        journal,
        announcer,
        {"targets.json": lambda: targets.error, "overrides.json": lambda: source.not_kept},
    )
    board.not_kept = state_watch.not_kept
    background = Background(announcer)
    board.background = background.status
    board.watchers.append(state_watch.watch)
    doctor_watch = DoctorWatch(doctor, announcer, clock=time.monotonic, wall_clock=time.time)
    board.doctor = doctor_watch.status
    board.watchers.append(doctor_watch.watch)
    routes = [
        *views.routes(),
        *canary_api.routes(),
        *engine_api.routes(),
        *DoctorApi(doctor_watch).routes(),
    ]
    return ControlParts(
        source=source,
        overrides=overrides,
        broadcast=broadcast,
        journal=journal,
        announcer=announcer,
        metrics=metrics,
        board=board,
        operator=operator,
        views=views,
        api=ControlApi(board, operator, source, journal, broadcast, routes),
        targets=targets,
        canary_api=canary_api,
        engine_api=engine_api,
        node_file=node_file,
        state_dir=config.state_dir,
        background=background,
        watched=(
            Watched(source.path, operator.reload_if_changed),
            Watched(document, node_file.look),
        ),
    )


def load_again(document: Path) -> NodeConfig:
    """What the node's document says now. Raises ``ConfigError``."""
    return load_node_config(document, memory_bytes=machine_memory_bytes()).value


@contextlib.contextmanager
def watched_gpus(kind: NodeKind, board: Board) -> Iterator[None]:
    """Inside, ``board`` shows what NVML tells. Other kinds of node have no GPUs to show."""
    if kind != "cuda":
        yield
        return
    reader = GpuReader(nvidia_library(), os.environ)
    watch = GpuWatch(reader.read, clock=time.monotonic, close=reader.close)
    board.gpus = watch.status
    watch.start()
    try:
        yield
    finally:
        watch.stop()


async def tell_of_gpus(board: Board, announcer: Announcer, *, every_s: float = EVERY_S) -> None:
    """Until cancelled, also while no engine runs: a lost GPU is what ends one."""
    events = GpuEvents()
    while True:
        seen = board.gpus() if board.gpus is not None else None
        for kind, sentence in events.news(seen, time.monotonic()):
            announcer.event(kind, sentence)
        await asyncio.sleep(every_s)
