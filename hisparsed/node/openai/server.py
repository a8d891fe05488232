"""The HTTP servers of the OpenAI API and of the metrics page: uvicorn with limits on clients.

Only listed paths of vLLM's application are served: it has more for developers, which stop the
engine, run code in its workers, or abort the calls of others. Also metrics of what admission and
the listener refused. Ports are bound in ``resources``.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hisparsed.config.sections import ApiLimits
from hisparsed.control.api.http_server import Connections, HttpLimits, QuietServer, bounded_protocol
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.logs.privacy import begin_call
from hisparsed.node.openai.admission import Admission, App, Receive, Scope
from hisparsed.node.openai.auth import KeyGuard
from hisparsed.node.openai.clear_answers import ClearAnswers
from hisparsed.node.openai.errors import Refusal, Send, form_of, is_below, refuse
from hisparsed.node.openai.upstream import How

SERVED: Final = (
    # About the node.
    "/health",
    "/load",
    "/metrics",
    "/ping",
    "/version",
    # About the API, for people.
    "/docs",
    "/openapi.json",
    "/redoc",
    # Calls, with the paths below them: batches, a stored answer, counting tokens.
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
    "/v1/systemone",
    "/detokenize",
    "/tokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    # Of models that embed or judge.
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)


def is_served(path: str) -> bool:
    """Whether ``path`` is in the list, or below one of it."""
    return any(is_below(path, known) for known in SERVED)


def only_served(schema: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI document without the paths that are not served."""
    paths = {path: one for path, one in schema.get("paths", {}).items() if is_served(path)}
    return {**schema, "paths": paths}


class ServedPaths:
    """``app`` behind the list; other paths are 404."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_served(scope["path"]):
            words = f"this node does not serve {scope['method']} {scope['path']}"
            await refuse(send, Refusal(404, "not_found", words), form_of(scope["path"]))
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)


log = logging.getLogger("hisparsed.daemon")

METRICS = HttpLimits(connections=64, body_s=5.0)
"""Of the listener that Prometheus reads, where it is not the API's."""

_GRACEFUL_S = 2
_OTHER_FILES = 1_024
"""Open files reserved for the journal, the engine's sockets, libraries and so on."""


def openai_app(
    app: App,
    *,
    api_keys: Sequence[str],
    limit: ContextLimit | None = None,
    stops: Callable[[], bool] = lambda: False,
) -> App:
    """``app`` behind the check of the API key and the list of served paths, its answers cleared.

    ``stops`` returns whether the node is stopping.
    """
    cleared = ClearAnswers(app, limit if limit is not None else ContextLimit(), stops)
    inside = KeyGuard(ServedPaths(cleared), api_keys=api_keys)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        begin_call()  # each request is its own task
        await inside(scope, receive, send)

    return application


def connections_of(limits: ApiLimits) -> Connections:
    """As configured, but at most the number of files that this process may open.

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


def http_server(app: Any, connections: Connections) -> QuietServer:
    """A server of ``app`` with the limits of ``connections``, those of one listener."""
    return QuietServer(app, bounded_protocol(connections, _error_body), graceful_s=_GRACEFUL_S)


def _error_body(status: int, code: str, message: str) -> bytes:
    return Refusal(status, code, message).error()


class AdmissionCollector(Collector):
    """Open, held, refused and ended requests, read from their counters at each scrape."""

    def __init__(
        self, admission: Admission, context: ContextLimit, ended: Mapping[How, int]
    ) -> None:
        self._admission = admission
        self._context = context
        self._ended = ended

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily(
            "hisparsed_open_requests", "Requests being answered now.", self._admission.open_requests
        )
        refused = CounterMetricFamily(
            "hisparsed_refused_requests",
            "Requests refused before the engine saw them.",
            labels=("reason",),
        )
        refused.add_metric(("draining",), self._admission.counters.refused_draining)
        refused.add_metric(("engine",), self._admission.counters.refused_engine)
        refused.add_metric(("session-limit",), self._admission.counters.refused_session)
        refused.add_metric(("body-size",), self._admission.counters.refused_size)
        refused.add_metric(("answers",), self._admission.counters.refused_answers)
        refused.add_metric(("max-context",), self._context.refused)
        yield refused
        ended = CounterMetricFamily(
            "hisparsed_ended_requests",
            "Requests that the engine was to answer, by how they ended.",
            labels=("how",),
        )
        for how in How:
            held = self._admission.counters.cancelled if how is How.CANCELLED else 0
            ended.add_metric((how.value,), self._ended.get(how, 0) + held)
        yield ended
        yield GaugeMetricFamily(
            "hisparsed_held_requests",
            "Requests that a limit of the policy holds back now.",
            self._admission.sessions.held + self._context.waiting,
        )
        yield CounterMetricFamily(
            "hisparsed_requests_held",
            "Requests that were held back: of new sessions, or longer than `admission.max_context` "
            "while another such request ran.",
            self._admission.sessions.held_total + self._context.held_total,
        )


class ConnectionCollector(Collector):
    """Connections of the API's listener, and which of them were refused or cut."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily(
            "hisparsed_open_connections",
            "Open client connections of the API, including idle ones.",
            self._connections.open,
        )
        cut = CounterMetricFamily(
            "hisparsed_cut_connections",
            "Connections of clients that the API refused or ended.",
            labels=("reason",),
        )
        for reason, count in self._connections.cut.items():
            cut.add_metric((reason.value,), count)
        yield cut
