"""One node from start to stop: what is refused early, what runs, how it ends.

The order matters and is written down once: lock, ports and policy before anything heavy; control
socket and servers before the engine, and until after it. Engines come and go in
``engine.supervisor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from hisparsed.config.machine import DetectedKind, NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.api.http_server import Connections
from hisparsed.control.api.socket import ControlServer
from hisparsed.control.background import Work
from hisparsed.control.doctor import Doctor
from hisparsed.control.file_watch import watch_files
from hisparsed.control.live_policy import PolicySource
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.launch import set_process_start
from hisparsed.errors import UserError
from hisparsed.logs.event_ids import NODE_KIND
from hisparsed.node.control_plane import (
    ControlParts,
    build_control,
    load_again,
    tell_of_gpus,
    watched_gpus,
)
from hisparsed.node.engine.life import (
    WORKER_STOP_ENV,
    EngineLife,
    StoppedWhileStarting,
    Surroundings,
)
from hisparsed.node.engine.records import EngineRecord
from hisparsed.node.engine.supervision import Outcome
from hisparsed.node.engine.supervisor import Supervisor, SupervisorParts
from hisparsed.node.engine.values import EngineValues, multiplier_key
from hisparsed.node.openai.admission import Gate
from hisparsed.node.openai.auth import keys_of
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.server import (
    METRICS,
    ConnectionCollector,
    GateCollector,
    connections_of,
    edge_server,
    guarded,
    metrics_app,
    metrics_page,
)
from hisparsed.node.openai.session_limit import Queue, SessionDoor
from hisparsed.node.openai.upstream import EngineSlot
from hisparsed.node.resources import bind_tcp, runtime_folder, state_dir_held
from hisparsed.node.service import ServiceManager, watched_logs

log = logging.getLogger("hisparsed.daemon")

EXIT_STOPPED = 0
EXIT_ENGINE_GONE = 70
_SERVER_STOP_S = 5.0


def run_node(
    config: NodeConfig,
    detected: DetectedKind,
    *,
    document: Path,
    manager: ServiceManager,
    doctor: Doctor,
) -> int:
    """Run one node until it is told to stop; returns the exit code.

    ``document`` is the file that ``config`` came from; it is watched for what needs a restart.
    ``manager`` is told of every turn of the node's life. ``doctor`` has looked at the machine.
    Raises ``UserError`` or ``ConfigError`` when the node cannot start; then nothing of it is
    left running.
    """
    from hisparsed.engine.launch import asked_multiplier, require_startable

    set_process_start(os.environ)
    log.info("%s", detected.banner, extra={"event_id": NODE_KIND})
    source = PolicySource(config.policy, clock=time.monotonic, wall_clock=time.time)
    kind = detected.kind
    most = asked_multiplier(config, kind, source)
    values = EngineValues(config, most, multiplier_key(config, kind))
    try:
        require_startable(config, kind, max_multiplier=values.max_multiplier)
    except UserError:
        # Values that were put aside are told of by the supervisor, which starts the last good ones.
        record = EngineRecord(config.state_dir)
        if not record.is_put_aside(values) or record.good(config) is None:
            raise
    with contextlib.ExitStack() as held:
        held.enter_context(state_dir_held(config.state_dir))
        folder = held.enter_context(runtime_folder(config.state_dir))
        api_socket = bind_tcp(config.api.host, config.api.port, key="api.port")
        held.callback(api_socket.close)
        metrics_socket = None
        if (config.metrics.host, config.metrics.port) != (config.api.host, config.api.port):
            metrics_socket = bind_tcp(config.metrics.host, config.metrics.port, key="metrics.port")
            held.callback(metrics_socket.close)
        try:
            with _signals_stop_the_start():
                return asyncio.run(
                    _serve(
                        config,
                        detected,
                        source,
                        api_socket,
                        metrics_socket,
                        document,
                        manager,
                        doctor,
                        folder,
                    )
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
    doctor: Doctor,
    folder: Path,
) -> int:
    from hisparsed.engine.launch import served_names

    model = served_names(config, detected.kind)[0]
    parts = build_control(config, source, detected.kind, model, document, doctor)
    control_server = ControlServer(
        parts.api.application(),
        config.control_socket,
        end_streams=parts.broadcast.close,
        tell=parts.announcer.event,
    )
    await control_server.start()
    parts.journal.start()
    watching = contextlib.ExitStack()
    watching.enter_context(watched_logs(parts.views.logs))
    watching.enter_context(watched_gpus(detected.kind, parts.board))
    parts.board.watchers.append(lambda outcome: manager.feed(outcome.reported_at_s))
    try:
        node = RunningNode(config, detected.kind, parts, manager, document, folder)
        return await node.run(api_socket, metrics_socket)
    finally:
        await control_server.stop()
        await asyncio.to_thread(parts.journal.close)
        watching.close()


class RunningNode:
    """Servers and signals of a node, and the supervisor of its engines; there from the start."""

    def __init__(
        self,
        config: NodeConfig,
        kind: NodeKind,
        parts: ControlParts,
        manager: ServiceManager,
        document: Path,
        folder: Path,
    ) -> None:
        self._config = config
        self._kind = kind
        self._parts = parts
        self._manager = manager
        self._document = document
        self._slot = EngineSlot(self._away)
        door = SessionDoor(clock=time.monotonic, queue=lambda: Queue(0, 0, 0))
        context = ContextLimit()
        self._gate = Gate(
            self._slot,
            door=door,
            metrics_page=self._page,
            context=context,
            unready=parts.board.unready,
        )
        parts.metrics.registry.register(GateCollector(self._gate, context))
        self._keys = keys_of(config.api.api_key_file, os.environ)
        around = Surroundings(
            parts,
            self._gate,
            context,
            kind,
            folder,
            config.supervision.hang_after,
            sets_worker_stop=WORKER_STOP_ENV not in os.environ,
        )
        self._supervisor = Supervisor(
            config,
            self._values(config),
            SupervisorParts(
                parts,
                self._gate,
                self._slot,
                manager,
                EngineRecord(config.state_dir),
                lambda values, number: EngineLife(values, around, number),
                lambda: self._values(load_again(document)),
                f"http://{config.api.host}:{config.api.port}",
            ),
        )
        parts.engine_api.engine = self._supervisor

    async def run(self, api_socket: socket.socket, metrics_socket: socket.socket | None) -> int:
        """Until it is told to stop, or no engine can be kept running; the exit code."""
        self._install_signals()
        clients = connections_of(self._config.api.limits)
        self._parts.metrics.registry.register(ConnectionCollector(clients))
        servers = [(edge_server(guarded(self._gate, api_keys=self._keys), clients), api_socket)]
        if metrics_socket is not None:
            app = metrics_app(self._page)
            servers.append((edge_server(app, Connections(METRICS)), metrics_socket))
        log.info(
            "Listening on http://%s:%d/v1, control socket %s.",
            self._config.api.host,
            self._config.api.port,
            self._config.control_socket,
        )
        serving = [
            asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers
        ]
        supervising = asyncio.create_task(self._supervisor.run())
        self._begin_background()
        try:
            return await self._until_ended(supervising, serving)
        finally:
            await self._parts.background.end()
            for server, _ in servers:
                server.should_exit = True
            _, hanging = await asyncio.wait(serving, timeout=_SERVER_STOP_S)
            for task in hanging:
                task.cancel()

    def _begin_background(self) -> None:
        parts = self._parts
        works: dict[str, Work] = {"file watch": lambda: watch_files(parts.watched)}
        if self._kind == "cuda":
            works["GPU watch"] = lambda: tell_of_gpus(parts.board, parts.announcer)
        parts.background.begin(works)

    async def _until_ended(
        self, supervising: asyncio.Task[Outcome], serving: list[asyncio.Task[None]]
    ) -> int:
        await asyncio.wait({supervising, *serving}, return_when=asyncio.FIRST_COMPLETED)
        if not supervising.done():
            log.error("A server ended by itself; stopping the node.")
            self._supervisor.ask_stop()
            self._supervisor.ask_stop()
            await supervising
            return EXIT_ENGINE_GONE
        outcome = supervising.result()
        if outcome is Outcome.GIVEN_UP:
            log.error("Ending with exit code %d.", EXIT_ENGINE_GONE)
            return EXIT_ENGINE_GONE
        if not self._supervisor.ever_served:
            log.info("Stopped while starting.")
        return EXIT_STOPPED

    def _away(self) -> Refusal:
        return self._supervisor.away()

    def _page(self) -> bytes:
        return metrics_page(self._parts.metrics.registry)

    def _values(self, config: NodeConfig) -> EngineValues:
        from hisparsed.engine.launch import asked_multiplier

        most = asked_multiplier(config, self._kind, self._parts.source)
        return EngineValues(config, most, multiplier_key(config, self._kind))

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._supervisor.ask_stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        with self._manager.reloading():
            self._parts.operator.reload(actor="SIGHUP")
