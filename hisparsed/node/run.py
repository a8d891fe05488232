"""One node from start to stop: early refusals, the running parts, the end.

The order matters and is defined in one place: lock, ports and policy before anything heavy; control
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hisparsed.config.machine import DetectedKind
from hisparsed.config.node import NodeConfig
from hisparsed.control.api.http_server import Connections
from hisparsed.control.api.socket import ControlServer
from hisparsed.control.background import Work
from hisparsed.control.doctor import Doctor
from hisparsed.control.file_watch import watch_files
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.watch import report_gpus
from hisparsed.engine.environment import set_process_start
from hisparsed.errors import EXIT_ENGINE_GONE, UserError
from hisparsed.logs.event_ids import NODE_KIND
from hisparsed.node.engine.processes import (
    DAEMON_ENV,
    STATE_ENV,
    daemon_on,
    end_orphans,
    started,
)
from hisparsed.node.engine.records import EngineRecord
from hisparsed.node.engine.shared_memory import SharedMemoryRecord
from hisparsed.node.engine.start import StoppedWhileStarting, start_session
from hisparsed.node.engine.supervision import Outcome
from hisparsed.node.engine.supervisor import Supervisor
from hisparsed.node.engine.values import EngineValues, multiplier_key
from hisparsed.node.node import Node, build_node, control_api, load_again
from hisparsed.node.openai.admission import STOPPING
from hisparsed.node.openai.auth import keys_of
from hisparsed.node.openai.metrics_page import metrics_app
from hisparsed.node.openai.server import (
    METRICS,
    ConnectionCollector,
    connections_of,
    http_server,
    openai_app,
)
from hisparsed.node.resources import bind_tcp, runtime_folder, state_dir_held
from hisparsed.node.service import ServiceManager, watched_logs
from hisparsed.node.startable import require_startable as refuse_unstartable

log = logging.getLogger("hisparsed.daemon")

EXIT_STOPPED = 0
_SERVER_STOP_S = 5.0


def run_node(
    config: NodeConfig,
    detected: DetectedKind,
    *,
    document: Path,
    manager: ServiceManager,
    doctor: Doctor,
) -> int:
    """Run one node until it is asked to stop; returns the exit code.

    ``document`` is the file that ``config`` came from; it is watched for what needs a restart.
    ``manager`` is notified of every change of the node's state. ``doctor`` has looked at the
    machine. Raises ``UserError`` or ``ConfigError`` when the node cannot start; then nothing of it
    is left running.
    """
    from hisparsed.engine.launch import (
        asked_multiplier,
        proved_multiplier,
        require_startable,
        served_names,
    )

    refuse_unstartable(config, os.environ)
    set_process_start(os.environ)
    log.info("%s", detected.banner, extra={"event_id": NODE_KIND})
    source = PolicySource(config.policy, clock=time.monotonic, wall_clock=time.time)
    kind = detected.kind

    def values_of(config: NodeConfig) -> EngineValues:
        return EngineValues(
            config,
            asked_multiplier(config, kind, source),
            proved_multiplier(config, kind, source),
            multiplier_key(config, kind),
        )

    values = values_of(config)
    try:
        require_startable(config, kind, max_multiplier=values.max_multiplier)
    except UserError:
        # The supervisor reports quarantined values, and starts the last good ones.
        record = EngineRecord(config.state_dir)
        if not record.is_quarantined(values) or record.good(config) is None:
            raise
    with contextlib.ExitStack() as held:
        held.enter_context(state_dir_held(config.state_dir))
        _begin_alone(config.state_dir)
        folder = held.enter_context(runtime_folder(config.state_dir))
        api_socket = bind_tcp(config.api.host, config.api.port, key="api.port")
        held.callback(api_socket.close)
        metrics_socket = None
        if (config.metrics.host, config.metrics.port) != (config.api.host, config.api.port):
            metrics_socket = bind_tcp(config.metrics.host, config.metrics.port, key="metrics.port")
            held.callback(metrics_socket.close)
        try:
            with _signals_stop_the_start():
                node = build_node(
                    config,
                    kind,
                    served_names(config, kind)[0],
                    source,
                    values,
                    document=document,
                    doctor=doctor,
                    manager=manager,
                    folder=folder,
                )
                return asyncio.run(
                    _serve(
                        node, lambda: values_of(load_again(document)), api_socket, metrics_socket
                    )
                )
        except StoppedWhileStarting:
            log.info("Stopped while starting.")
            return EXIT_STOPPED


def _begin_alone(state_dir: Path) -> None:
    """Call with the lock on ``state_dir`` held: what a killed daemon left ends or is removed.

    Raises ``UserError`` if a daemon lives whose lock was removed with its folder.
    """
    if (daemon := daemon_on(state_dir)) is not None:
        raise UserError(
            f"state_dir: {state_dir} belongs to a running daemon (pid {daemon}), although its lock "
            "was removed; stop it or set another state_dir"
        )
    os.environ[STATE_ENV] = str(state_dir)
    os.environ[DAEMON_ENV] = started(os.getpid())
    # vLLM renames its processes with setproctitle, which would overwrite the marks that identify
    # them.
    os.environ["SPT_NOENV"] = "1"
    ended = end_orphans(state_dir)
    if ended:
        log.warning("Ended processes of an engine whose daemon was killed: %s.", ended)
    removed = SharedMemoryRecord(state_dir).remove()
    if removed:
        log.warning("Removed shared memory of an engine whose node was killed: %s.", removed)


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
    node: Node,
    read_values: Callable[[], EngineValues],
    api_socket: socket.socket,
    metrics_socket: socket.socket | None,
) -> int:
    supervisor = Supervisor(node, partial(start_session, node), read_values)
    # Before anything starts: a signal that raises in the middle would leave a half-started node.
    _install_signals(node, supervisor)
    plane = node.plane
    control_server = ControlServer(
        control_api(node, supervisor).application(),
        node.config.control_socket,
        end_streams=plane.broadcast.close,
        report=plane.recorder.event,
    )
    watching = contextlib.ExitStack()
    try:
        await control_server.start()
        plane.journal.start()
        watching.enter_context(watched_logs(node.views.logs))
        if node.gpus is not None:
            node.gpus.start()
            watching.callback(node.gpus.stop)
        return await _run(node, supervisor, api_socket, metrics_socket)
    finally:
        await control_server.stop()
        await asyncio.to_thread(plane.journal.close)
        watching.close()


async def _run(
    node: Node,
    supervisor: Supervisor,
    api_socket: socket.socket,
    metrics_socket: socket.socket | None,
) -> int:
    """Runs until it is asked to stop, or no engine can be kept running; returns the exit code."""
    config = node.config
    clients = connections_of(config.api.limits)
    node.plane.metrics.registry.register(ConnectionCollector(clients))
    app = openai_app(
        node.admission,
        api_keys=keys_of(config.api.api_key_file, os.environ),
        limit=node.context_limit,
        stops=lambda: node.lifecycle.refusal() == STOPPING,
    )
    servers = [(http_server(app, clients), api_socket)]
    if metrics_socket is not None:
        page = metrics_app(node.metrics_page)
        servers.append((http_server(page, Connections(METRICS)), metrics_socket))
    log.info(
        "Listening on http://%s:%d/v1, control socket %s.",
        config.api.host,
        config.api.port,
        config.control_socket,
    )
    serving = [
        asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers
    ]
    supervising = asyncio.create_task(supervisor.run())
    node.background.begin(_background_work(node))
    try:
        return await _until_ended(supervisor, supervising, serving)
    finally:
        await node.background.end()
        for server, _ in servers:
            server.should_exit = True
        _, hanging = await asyncio.wait(serving, timeout=_SERVER_STOP_S)
        for task in hanging:
            task.cancel()


def _background_work(node: Node) -> dict[str, Work]:
    works: dict[str, Work] = {"file watch": lambda: watch_files(node.watched)}
    gpus = node.gpus
    if gpus is not None:
        works["GPU watch"] = lambda: report_gpus(gpus.status, node.plane.recorder)
    return works


async def _until_ended(
    supervisor: Supervisor, supervising: asyncio.Task[Outcome], serving: list[asyncio.Task[None]]
) -> int:
    await asyncio.wait({supervising, *serving}, return_when=asyncio.FIRST_COMPLETED)
    if not supervising.done():
        log.error("A server ended unexpectedly; stopping the node.")
        supervisor.ask_stop()
        supervisor.ask_stop()
        await supervising
        return EXIT_ENGINE_GONE
    outcome = supervising.result()
    if outcome is Outcome.GIVEN_UP:
        log.error("Ending with exit code %d.", EXIT_ENGINE_GONE)
        return EXIT_ENGINE_GONE
    if not supervisor.ever_served:
        log.info("Stopped while starting.")
    return EXIT_STOPPED


def _install_signals(node: Node, supervisor: Supervisor) -> None:
    def reload() -> None:
        with node.manager.reloading():
            node.operator.reload(actor="SIGHUP")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.ask_stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
