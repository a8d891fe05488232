"""One node from start to stop: what is refused early, what runs, how it ends.

Order matters and is written down once: lock, ports and policy before the engine; the engine
before the servers; draining before stopping. The parts know nothing of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import uvicorn

from hisparsed.config.kind import DetectedKind
from hisparsed.config.node import NodeConfig, read_api_keys
from hisparsed.control.engine_port import EngineGone
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.records import EventKind
from hisparsed.control.socket import ControlServer, QuietServer
from hisparsed.control.status import Lifecycle
from hisparsed.daemon.gate import Gate, SessionLimit
from hisparsed.daemon.listen import bind_tcp, make_state_dir, state_lock
from hisparsed.daemon.metrics_page import GateCollector, metrics_app, metrics_page
from hisparsed.daemon.parts import ControlParts, build_control
from hisparsed.engine.names import SERVED_MODEL_NAME
from hisparsed.policy.signals import Admission

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle

log = logging.getLogger("hisparsed.daemon")

EXIT_STOPPED = 0
EXIT_ENGINE_GONE = 70
_POLL_S = 0.1
_ENGINE_STOP_S = 20.0
_SERVER_STOP_S = 5.0


class StoppedWhileStarting(BaseException):
    """SIGTERM or SIGINT came before the node served."""


def run_node(config: NodeConfig, detected: DetectedKind) -> int:
    """Run one node until it is told to stop; returns the exit code.

    Raises ``UserError`` or ``ConfigError`` when the node cannot start; then nothing of it is
    left running.
    """
    from hisparsed.engine.launch import require_startable

    log.info("%s", detected.banner)
    source = PolicySource(config.policy, wall_clock=time.time)
    max_multiplier = source.active.value.hot.max
    require_startable(config, detected.kind, max_multiplier=max_multiplier)
    make_state_dir(config.state_dir)
    with contextlib.ExitStack() as held:
        held.enter_context(state_lock(config.state_dir))
        api_socket = bind_tcp(config.api.host, config.api.port, key="api.port")
        held.callback(api_socket.close)
        metrics_socket = None
        if (config.metrics.host, config.metrics.port) != (config.api.host, config.api.port):
            metrics_socket = bind_tcp(config.metrics.host, config.metrics.port, key="metrics.port")
            held.callback(metrics_socket.close)
        try:
            with _signals_stop_the_start():
                return asyncio.run(_serve(config, detected, source, api_socket, metrics_socket))
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
) -> int:
    from hisparsed.engine.launch import launch_engine
    from hisparsed.engine.openai_app import build_openai_app

    model = config.model if detected.kind == "cuda" and config.model else SERVED_MODEL_NAME
    parts = build_control(config, source, detected.kind, model)
    control_server = ControlServer(
        parts.api.application(), config.control_socket, end_streams=parts.broadcast.close
    )
    await control_server.start()
    parts.journal.start()
    try:
        max_multiplier = source.active.value.hot.max
        engine = launch_engine(config, max_multiplier=max_multiplier)
        try:
            key_file = config.api.api_key_file
            keys = read_api_keys(key_file) if key_file is not None else []
            app = await build_openai_app(engine.llm, api_keys=keys)
            return await RunningNode(config, engine, parts).run(app, api_socket, metrics_socket)
        finally:
            await asyncio.to_thread(engine.shutdown, _ENGINE_STOP_S)
    finally:
        await control_server.stop()
        await asyncio.to_thread(parts.journal.close)


class RunningNode:
    """Servers, loop and signals of a node whose engine serves."""

    def __init__(self, config: NodeConfig, engine: EngineHandle, parts: ControlParts) -> None:
        self._config = config
        self._engine = engine
        self._parts = parts
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(
        self,
        app: Any,
        api_socket: socket.socket,
        metrics_socket: socket.socket | None,
    ) -> int:
        parts = self._parts

        def page() -> bytes:
            return metrics_page(parts.metrics.registry)

        gate = Gate(
            app,
            clock=time.monotonic,
            waiting_calls=lambda: self._engine.waiting_calls,
            metrics_page=page,
        )
        parts.metrics.registry.register(GateCollector(gate))
        loop = parts.make_loop(self._engine, lambda admission: _limit(gate, admission))
        self._install_signals()
        api_server = _server(gate)
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
            log.info(
                "Serving on http://%s:%d/v1, control socket %s.",
                self._config.api.host,
                self._config.api.port,
                self._config.control_socket,
            )
            code = await self._until_stopped(gate, ticking, tasks)
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            return code
        finally:
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
        done, _ = await asyncio.wait(
            {stopping, ticking, *servers}, return_when=asyncio.FIRST_COMPLETED
        )
        if ticking in done:
            return self._loop_ended(ticking)
        if stopping not in done:
            log.error("A server ended by itself; stopping the node.")
            return EXIT_ENGINE_GONE
        return await self._drain(gate, ticking)

    async def _drain(self, gate: Gate, ticking: asyncio.Task[None]) -> int:
        gate.draining = True
        self._parts.board.lifecycle = Lifecycle.DRAINING
        timeout_s = self._config.drain_timeout
        log.info("Draining: %d calls open, at most %gs.", gate.open_requests, timeout_s)
        deadline = time.monotonic() + timeout_s
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
        self._parts.operator.reload(actor="SIGHUP")


def _limit(gate: Gate, admission: Admission) -> None:
    gate.limit = SessionLimit(admission.max_waiting_sessions, admission.retry_after_s)


def _server(app: Any) -> QuietServer:
    return QuietServer(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    )
