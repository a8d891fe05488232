"""One node from start to stop: what is refused early, what runs, how it ends.

Order matters and is written down once: lock, ports and policy before the engine; the engine
before the servers; draining before stopping. The parts know nothing of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from hisparsed.canary.asker import CanaryAsker
from hisparsed.config.kind import DetectedKind
from hisparsed.config.node import NodeConfig, read_api_keys
from hisparsed.control.engine_port import EngineGone
from hisparsed.control.file_watch import watch_files
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.records import EventKind
from hisparsed.control.socket import ControlServer, QuietServer
from hisparsed.control.status import Lifecycle
from hisparsed.daemon.gate import Gate
from hisparsed.daemon.key_guard import KeyGuard
from hisparsed.daemon.listen import bind_tcp, make_state_dir, state_lock
from hisparsed.daemon.logs import watched_logs
from hisparsed.daemon.metrics_page import GateCollector, metrics_app, metrics_page
from hisparsed.daemon.notify import ServiceManager
from hisparsed.daemon.parts import ControlParts, build_control
from hisparsed.daemon.patience import engine_stop_s, start_limit_s
from hisparsed.daemon.runtime_folder import runtime_folder
from hisparsed.daemon.session_door import Queue, SessionDoor, SessionLimit
from hisparsed.daemon.standstill import EXIT_STALLED, RestartFile, Standstill
from hisparsed.daemon.start import StoppedWhileStarting, start_beside_loop
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.names import SERVED_MODEL_NAME
from hisparsed.policy.signals import Admission

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle

log = logging.getLogger("hisparsed.daemon")

EXIT_STOPPED = 0
EXIT_ENGINE_GONE = 70
_POLL_S = 0.1
_SERVER_STOP_S = 5.0


def run_node(
    config: NodeConfig, detected: DetectedKind, *, document: Path, manager: ServiceManager
) -> int:
    """Run one node until it is told to stop; returns the exit code.

    ``document`` is the file that ``config`` came from; it is watched for what needs a restart.
    ``manager`` is told of every turn of the node's life.
    Raises ``UserError`` or ``ConfigError`` when the node cannot start; then nothing of it is
    left running.
    """
    from hisparsed.engine.launch import require_startable

    log.info("%s", detected.banner)
    source = PolicySource(config.policy, wall_clock=time.time)
    max_multiplier = source.highest_multiplier
    require_startable(config, detected.kind, max_multiplier=max_multiplier)
    make_state_dir(config.state_dir)
    with contextlib.ExitStack() as held:
        held.enter_context(state_lock(config.state_dir))
        held.enter_context(runtime_folder(config.state_dir))
        api_socket = bind_tcp(config.api.host, config.api.port, key="api.port")
        held.callback(api_socket.close)
        metrics_socket = None
        if (config.metrics.host, config.metrics.port) != (config.api.host, config.api.port):
            metrics_socket = bind_tcp(config.metrics.host, config.metrics.port, key="metrics.port")
            held.callback(metrics_socket.close)
        try:
            with _signals_stop_the_start():
                return asyncio.run(
                    _serve(config, detected, source, api_socket, metrics_socket, document, manager)
                )
        except StoppedWhileStarting:
            log.info("Stopped while starting.")
            return EXIT_STOPPED


@contextlib.contextmanager
def _signals_stop_the_start() -> Any:
    def stop(*_: object) -> None:
        raise StoppedWhileStarting

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _serve(
    config: NodeConfig,
    detected: DetectedKind,
    source: PolicySource,
    api_socket: socket.socket,
    metrics_socket: socket.socket | None,
    document: Path,
    manager: ServiceManager,
) -> int:
    # Imported before the logs are watched: vLLM's import sets up its logger anew.
    from hisparsed.engine.launch import launch_engine
    from hisparsed.engine.openai_app import build_openai_app, preload

    model = config.model if detected.kind == "cuda" and config.model else SERVED_MODEL_NAME
    parts = build_control(config, source, detected.kind, model, document)
    control_server = ControlServer(
        parts.api.application(), config.control_socket, end_streams=parts.broadcast.close
    )
    await control_server.start()
    parts.journal.start()
    watching = contextlib.ExitStack()
    watching.enter_context(watched_logs(parts.views.logs))
    parts.board.watchers.append(lambda outcome: manager.feed(outcome.reported_at_s))
    stop_s = engine_stop_s(config.host_budget)
    # vLLM gives its workers five seconds, in which no large pool is unpinned.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(int(stop_s)))
    try:
        max_multiplier = source.highest_multiplier

        def launch() -> EngineHandle:
            started = launch_engine(config, max_multiplier=max_multiplier)
            preload()
            return started

        async with manager.busy("Starting the engine", at_most_s=start_limit_s(config.host_budget)):
            engine = await start_beside_loop(launch, lambda begun: begun.shutdown(stop_s))
        parts.views.requests = engine.requests
        try:
            key_file = config.api.api_key_file
            keys = read_api_keys(key_file) if key_file is not None else []
            app = await build_openai_app(engine.llm, api_keys=keys)
            node = RunningNode(config, engine, parts, manager)
            return await node.run(app, keys, api_socket, metrics_socket)
        finally:
            manager.stopping("Stopping the engine", within_s=2 * stop_s)
            async with manager.busy("Stopping the engine", at_most_s=2 * stop_s):
                await asyncio.to_thread(engine.shutdown, stop_s)
    finally:
        await control_server.stop()
        await asyncio.to_thread(parts.journal.close)
        watching.close()


class RunningNode:
    """Servers, loop and signals of a node whose engine serves."""

    def __init__(
        self,
        config: NodeConfig,
        engine: EngineHandle,
        parts: ControlParts,
        manager: ServiceManager,
    ) -> None:
        self._manager = manager
        self._config = config
        self._engine = engine
        self._parts = parts
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._stalled = asyncio.Event()

    async def run(
        self,
        app: Any,
        api_keys: Sequence[str],
        api_socket: socket.socket,
        metrics_socket: socket.socket | None,
    ) -> int:
        parts = self._parts

        def page() -> bytes:
            return metrics_page(parts.metrics.registry)

        engine = self._engine
        door = SessionDoor(
            clock=time.monotonic,
            queue=lambda: Queue(engine.reports, engine.waiting_calls, engine.room_for_calls),
        )
        gate = Gate(app, door=door, metrics_page=page)
        context = engine.llm.context_limit
        engine.refused_calls = lambda: gate.counters.refused_session + context.refused
        parts.metrics.registry.register(GateCollector(gate, context))
        canary = parts.start_canary(CanaryAsker(engine))
        parts.board.watchers.append(self._standstill().watch)
        loop = parts.make_loop(self._engine, lambda admission: _limit(door, context, admission))
        self._install_signals()
        api_server = _server(KeyGuard(gate, api_keys=api_keys))
        # vLLM's error handlers stop the server through this when they find the engine dead.
        app.state.server = api_server
        servers = [(api_server, api_socket)]
        if metrics_socket is not None:
            servers.append((_server(metrics_app(page)), metrics_socket))
        tasks: list[asyncio.Task[None]] = []
        try:
            await loop.start()
            tasks = [
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in servers
            ]
            ticking = asyncio.create_task(loop.run())
            watching = asyncio.create_task(watch_files(parts.watched))
            log.info(
                "Serving on http://%s:%d/v1, control socket %s.",
                self._config.api.host,
                self._config.api.port,
                self._config.control_socket,
            )
            self._manager.ready(
                f"Serving on http://{self._config.api.host}:{self._config.api.port}"
            )
            code = await self._until_stopped(gate, ticking, tasks)
            ticking.cancel()
            watching.cancel()
            await asyncio.gather(ticking, watching, return_exceptions=True)
            return code
        finally:
            await canary.close()
            for server, _ in servers:
                server.should_exit = True
            if tasks:
                _, hanging = await asyncio.wait(tasks, timeout=_SERVER_STOP_S)
                for task in hanging:
                    task.cancel()

    async def _until_stopped(
        self, gate: Gate, ticking: asyncio.Task[None], servers: list[asyncio.Task[None]]
    ) -> int:
        stopping = asyncio.create_task(self._stop.wait())
        stalled = asyncio.create_task(self._stalled.wait())
        done, _ = await asyncio.wait(
            {stopping, stalled, ticking, *servers}, return_when=asyncio.FIRST_COMPLETED
        )
        if ticking in done:
            return self._loop_ended(ticking)
        if stalled in done:
            # Nothing to drain: calls that stand still do not end.
            return EXIT_STALLED
        stalled.cancel()
        if stopping not in done:
            log.error("A server ended by itself; stopping the node.")
            return EXIT_ENGINE_GONE
        return await self._drain(gate, ticking)

    async def _drain(self, gate: Gate, ticking: asyncio.Task[None]) -> int:
        gate.drain()
        self._parts.board.lifecycle = Lifecycle.DRAINING
        timeout_s = self._config.drain_timeout
        log.info("Draining: %d calls open, at most %gs.", gate.open_requests, timeout_s)
        self._manager.stopping("Draining", within_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        async with self._manager.busy("Draining", at_most_s=timeout_s):
            while gate.open_requests and time.monotonic() < deadline:
                if self._stop_now.is_set():
                    break
                if ticking.done():
                    return self._loop_ended(ticking)
                await asyncio.sleep(_POLL_S)
        cut = gate.open_requests
        sentence = f"Stopped; {cut} calls were cut off." if cut else "Stopped; all calls ended."
        self._parts.board.lifecycle = Lifecycle.STOPPED
        self._parts.announcer.event(EventKind.STOPPED, sentence)
        return EXIT_STOPPED

    def _standstill(self) -> Standstill:
        return Standstill(
            self._parts.announcer,
            RestartFile(self._config.state_dir),
            wall_clock=time.time,
            end_node=self._stalled.set,
        )

    def _loop_ended(self, ticking: asyncio.Task[None]) -> int:
        error = ticking.exception()
        if isinstance(error, EngineGone):
            log.error("The engine is gone: %s. Ending with exit code %d.", error, EXIT_ENGINE_GONE)
            return EXIT_ENGINE_GONE
        if error is not None:
            raise error
        raise RuntimeError("the control loop ended by itself")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload_signal)

    def _stop_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _reload_signal(self) -> None:
        with self._manager.reloading():
            self._parts.operator.reload(actor="SIGHUP")


def _limit(door: SessionDoor, context: ContextLimit, admission: Admission) -> None:
    door.limit = SessionLimit(
        max_waiting=admission.max_waiting_sessions,
        retry_after_s=admission.retry_after_s,
        when_full=admission.when_full,
        max_wait_s=admission.max_wait_s,
    )
    context.max_tokens = admission.max_context_tokens
    context.over = admission.over_max_context


def _server(app: Any) -> QuietServer:
    return QuietServer(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    )
