"""One page of metrics: the engine's own, the daemon's, and what the gate refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.routing import Mount

from hisparsed.daemon.gate import Gate


class GateCollector(Collector):
    """Open and refused requests, read from the gate when asked."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily(
            "hisparsed_open_requests", "Requests being answered now.", self._gate.open_requests
        )
        refused = CounterMetricFamily(
            "hisparsed_refused_requests", "Requests refused at the gate.", labels=("reason",)
        )
        refused.add_metric(("draining",), self._gate.counters.refused_draining)
        refused.add_metric(("session-limit",), self._gate.counters.refused_session)
        yield refused


def metrics_page(registry: CollectorRegistry) -> bytes:
    """vLLM's metrics (the process-wide registry) and those of ``registry``."""
    return generate_latest(REGISTRY) + generate_latest(registry)


def metrics_app(gate: Gate) -> Starlette:
    """``/metrics`` for an address of its own; everything else is not found there."""
    return Starlette(routes=[Mount("/metrics", app=_only_metrics(gate))])


def _only_metrics(gate: Gate) -> Any:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await gate({**scope, "path": "/metrics"}, receive, send)

    return serve
