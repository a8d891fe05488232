"""The parts that live as long as the daemon, built in one direction: each from those above it.

Nothing here is started; ``run`` does that, in order. Engines come and go in ``node.session``: code
that needs the engine asks for it each time, and may find none.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from hisparsed import __version__
from hisparsed.canary.api import CanaryApi
from hisparsed.config.machine import NodeKind, machine_memory_bytes
from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.control.api.app import ControlApi
from hisparsed.control.api.engine import EngineApi, EngineRestarter
from hisparsed.control.api.views import ApiViews
from hisparsed.control.background import Background
from hisparsed.control.doctor import Doctor, DoctorApi, DoctorWatch
from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.file_watch import NodeFile, Watched
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal, JournalWriter
from hisparsed.control.journal.store import Retention
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.loop import ControlPlane
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.operator import Operator, restore_overrides
from hisparsed.control.state_files import TargetFile
from hisparsed.control.status.current import CurrentStatus, OnTick, StatusSources
from hisparsed.control.status.document import CanaryStatus, NodeInfo
from hisparsed.control.status.history import History
from hisparsed.control.watch import StateWatch
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.cuda.nvml import GpuReader, GpuWatch, nvidia_library
from hisparsed.logs.ring import LogRing
from hisparsed.node.engine.kernels import KernelKeeper
from hisparsed.node.engine.lifecycle import EngineLifecycle
from hisparsed.node.engine.records import EngineRecord
from hisparsed.node.engine.session import EngineSession
from hisparsed.node.engine.values import EngineValues
from hisparsed.node.openai.admission import Admission
from hisparsed.node.openai.metrics_page import MetricsPage
from hisparsed.node.openai.server import AdmissionCollector
from hisparsed.node.openai.session_limit import Queue, SessionLimiter
from hisparsed.node.openai.upstream import Upstream
from hisparsed.node.service import ServiceManager

WORKER_STOP_ENV = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM gives its workers five seconds, which is too short to unpin a large pool."""

log = logging.getLogger("hisparsed.daemon")


@dataclass(frozen=True)
class Node:
    """All but ``session`` is there from the start to the end of the daemon."""

    config: NodeConfig
    kind: NodeKind
    folder: Path
    """For the files of engines while they live."""
    sets_worker_stop: bool
    """Whether the daemon sets vLLM's limit on the stop of its workers."""
    manager: ServiceManager
    lifecycle: EngineLifecycle
    plane: ControlPlane
    operator: Operator
    views: ApiViews
    doctor: DoctorWatch
    gpus: GpuWatch | None
    """``None`` on nodes without GPUs."""
    kernels: KernelKeeper | None
    """``None`` on other than CUDA nodes."""
    node_file: NodeFile
    watched: tuple[Watched, ...]
    """The policy and the node's document."""
    background: Background
    context_limit: ContextLimit
    upstream: Upstream
    admission: Admission
    metrics_page: MetricsPage

    @property
    def session(self) -> EngineSession | None:
        """The engine that serves, or drains; ``None`` while there is none."""
        return self.lifecycle.session


def build_node(
    config: NodeConfig,
    kind: NodeKind,
    model: str,
    source: PolicySource,
    values: EngineValues,
    *,
    document: Path,
    doctor: Doctor,
    manager: ServiceManager,
    folder: Path,
) -> Node:
    """Reads the overrides and the last good values, and no other file.

    ``values`` are those of ``config``, which was read from ``document``. ``doctor`` has looked at
    the machine. ``folder`` is for the files of engines.
    """
    lifecycle = EngineLifecycle.first(config, values, EngineRecord(config.state_dir))
    journal = make_journal(config)
    holds, broadcast = Holds(), Broadcast()
    recorder = EventRecorder(journal, broadcast, wall_clock=time.time)
    restore_overrides(source, recorder, config.state_dir)
    operator = Operator(source, holds, recorder, wall_clock=time.time)
    targets = TargetFile(config.state_dir)
    node_file = NodeFile(document, config, recorder, load=load_again)
    state_watch = StateWatch(
        journal,
        recorder,
        {"targets.json": lambda: targets.error, "overrides.json": lambda: source.not_kept},
    )
    doctor_watch = DoctorWatch(doctor, recorder, clock=time.monotonic, wall_clock=time.time)
    gpus = gpu_watch(kind)

    def canary() -> CanaryStatus | None:
        return lifecycle.session.canary.status() if lifecycle.session else None

    kernels = None
    if kind == "cuda":
        kernels = KernelKeeper(config.state_dir, recorder, canary, wall_clock=time.time)
    background = Background(recorder)
    views = ApiViews(
        journal,
        broadcast,
        LogRing(),
        History(),
        engine=lambda: lifecycle.session.handle.requests if lifecycle.session else None,
    )

    daemon_on_tick: tuple[OnTick, ...] = (
        views.watch,
        state_watch.watch,
        doctor_watch.watch,
        lambda outcome: manager.feed(outcome.reported_at_s),
        *(() if kernels is None else (kernels.watch,)),
    )

    def on_tick() -> Iterable[OnTick]:
        session = lifecycle.session
        return daemon_on_tick if session is None else (*daemon_on_tick, *session.on_tick)

    status = CurrentStatus(
        NodeInfo(
            name=f"{socket.gethostname()}:{config.api.port}",
            kind=kind,
            model=model,
            version=__version__,
            api_url=f"http://{config.api.host}:{config.api.port}",
            pid=os.getpid(),
            started_unix_s=time.time(),
        ),
        source,
        holds,
        journal,
        broadcast,
        StatusSources(
            lifecycle=lambda: lifecycle.lifecycle,
            engine=lifecycle.status,
            canary=canary,
            doctor=doctor_watch.status,
            gpus=lambda: gpus.status() if gpus else None,
            kernels=lambda: kernels.status() if kernels else None,
            background=background.status,
            not_kept=state_watch.not_kept,
            node_pending=lambda: node_file.pending,
            on_tick=on_tick,
        ),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    metrics = ControlMetrics(status.status)
    metrics_page = MetricsPage(metrics.registry, serves=lambda: lifecycle.session is not None)
    context_limit = ContextLimit()
    upstream = Upstream(lambda: lifecycle.session, lifecycle.away)
    admission = Admission(
        upstream,
        sessions=SessionLimiter(
            clock=time.monotonic,
            queue=lambda: lifecycle.session.queue() if lifecycle.session else Queue(0, 0, 0),
        ),
        metrics_page=metrics_page,
        context=context_limit,
        refusal=lifecycle.refusal,
        unready=status.unready,
        background=upstream.background,
    )
    metrics.registry.register(AdmissionCollector(admission, context_limit, upstream.ended))
    return Node(
        config=config,
        kind=kind,
        folder=folder,
        sets_worker_stop=WORKER_STOP_ENV not in os.environ,
        manager=manager,
        lifecycle=lifecycle,
        plane=ControlPlane(
            source,
            holds,
            journal,
            broadcast,
            recorder,
            status,
            metrics,
            clock=time.monotonic,
            wall_clock=time.time,
            targets=targets,
        ),
        operator=operator,
        views=views,
        doctor=doctor_watch,
        gpus=gpus,
        kernels=kernels,
        node_file=node_file,
        watched=(
            Watched(source.path, operator.reload_if_changed),
            Watched(document, node_file.look),
        ),
        background=background,
        context_limit=context_limit,
        upstream=upstream,
        admission=admission,
        metrics_page=metrics_page,
    )


def make_journal(config: NodeConfig) -> Journal:
    run = uuid4().hex
    writer = JournalWriter(
        config.state_dir,
        run=run,
        clock=time.monotonic,
        stamp=lambda: datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
        log=log.warning,
        retention=Retention(config.journal.max_ticks, config.journal.max_size),
    )
    return Journal(writer, run=run)


def gpu_watch(kind: NodeKind) -> GpuWatch | None:
    """Reads NVML, once it is started. Other kinds of node have no GPUs to show."""
    if kind != "cuda":
        return None
    reader = GpuReader(nvidia_library(), os.environ)
    return GpuWatch(reader.read, clock=time.monotonic, close=reader.close)


def control_api(node: Node, restarter: EngineRestarter) -> ControlApi:
    """All routes of the control socket; ``restarter`` restarts the engine."""
    plane = node.plane
    routes = [
        *node.views.routes(),
        *CanaryApi(lambda: node.session.canary if node.session else None).routes(),
        *EngineApi(restarter).routes(),
        *DoctorApi(node.doctor).routes(),
    ]
    return ControlApi(
        plane.status, node.operator, plane.source, plane.journal, plane.broadcast, routes
    )


def load_again(document: Path) -> NodeConfig:
    """The node's document as it is now. Raises ``ConfigError``."""
    return load_node_config(document, memory_bytes=machine_memory_bytes()).value
