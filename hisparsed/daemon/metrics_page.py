"""One page of metrics: the engine's own, the daemon's, and what gate and listener refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparsed.control.http_limits import Connections
from hisparsed.daemon.gate import Gate
from hisparsed.engine.context_limit import ContextLimit


class GateCollector(Collector):
    """Open, held and refused requests, read where they are counted when asked."""

    def __init__(self, gate: Gate, context: ContextLimit) -> None:
        self._gate = gate
        self._context = context

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily(
            "hisparsed_open_requests", "Requests being answered now.", self._gate.open_requests
        )
        refused = CounterMetricFamily(
            "hisparsed_refused_requests",
            "Requests refused before the engine saw them.",
            labels=("reason",),
        )
        refused.add_metric(("draining",), self._gate.counters.refused_draining)
        refused.add_metric(("engine",), self._gate.counters.refused_engine)
        refused.add_metric(("session-limit",), self._gate.counters.refused_session)
        refused.add_metric(("body-size",), self._gate.counters.refused_size)
        refused.add_metric(("answers",), self._gate.counters.refused_answers)
        refused.add_metric(("max-context",), self._context.refused)
        yield refused
        yield GaugeMetricFamily(
            "hisparsed_held_requests",
            "Requests that a limit of the policy keeps out of the engine now.",
            self._gate.door.held + self._context.waiting,
        )
        yield CounterMetricFamily(
            "hisparsed_requests_held",
            "Requests of new sessions that the gate ever held back.",
            self._gate.door.held_total,
        )


class ConnectionCollector(Collector):
    """Connections of the API's listener, and which of them were refused or cut."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily(
            "hisparsed_open_connections",
            "Connections of clients of the API now, idle ones too.",
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


def metrics_page(registry: CollectorRegistry) -> bytes:
    """vLLM's metrics (the process-wide registry) and those of ``registry``."""
    return generate_latest(REGISTRY) + generate_latest(registry)


def metrics_app(page: Callable[[], bytes]) -> Starlette:
    """``/metrics`` for an address of its own; everything else is not found there."""

    async def serve(_: Request) -> Response:
        return Response(page(), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/metrics", serve)])
