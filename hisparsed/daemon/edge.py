"""The HTTP server of the OpenAI side: uvicorn with this node's limits on clients.

Not the application on it, nor the port: those are ``gate`` and ``listen``.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from typing import Any

from hisparsed.config.api_limits import ApiLimits
from hisparsed.control.bounded_http import bounded
from hisparsed.control.http_limits import Connections, HttpLimits
from hisparsed.control.log_privacy import begin_call
from hisparsed.control.socket import QuietServer
from hisparsed.daemon.gate import App, Receive, Scope
from hisparsed.daemon.key_guard import KeyGuard
from hisparsed.daemon.refusal import Refusal, Send
from hisparsed.daemon.served_paths import ServedPaths

log = logging.getLogger("hisparsed.daemon")

METRICS = HttpLimits(connections=64, body_s=5.0)
"""Of the listener that Prometheus reads, where it is not the API's."""

_GRACEFUL_S = 2
_OTHER_FILES = 1_024
"""Left for the journal, the engine's sockets, libraries and everything else that opens files."""


def guarded(gate: App, *, api_keys: Sequence[str]) -> App:
    """What a client meets, from outside: the key, the list of paths, the gate."""
    inside = KeyGuard(ServedPaths(gate), api_keys=api_keys)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        begin_call()  # each request is a task of its own
        await inside(scope, receive, send)

    return application


def connections_of(limits: ApiLimits) -> Connections:
    """As configured, or as many as this process may open files for.

    Raises the soft limit on open files where the hard one allows it.
    """
    wanted = limits.connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    granted = min(limits.connections, max(soft - _OTHER_FILES, soft // 2))
    if granted < limits.connections:
        log.warning(
            "api.limits.connections: %d, but this process may open %d files; taking %d "
            "connections. Raise LimitNOFILE of the service.",
            limits.connections,
            soft,
            granted,
        )
    return Connections(
        HttpLimits(
            connections=granted,
            header_s=limits.header_timeout,
            body_s=limits.body_timeout,
            idle_s=limits.idle_timeout,
            write_s=limits.read_timeout,
        )
    )


def edge_server(app: Any, connections: Connections) -> QuietServer:
    """A server of ``app`` that keeps to the limits of ``connections``, one listener's."""
    return QuietServer(app, bounded(connections, _error_body), graceful_s=_GRACEFUL_S)


def _error_body(status: int, code: str, message: str) -> bytes:
    return Refusal(status, code, message).error()
