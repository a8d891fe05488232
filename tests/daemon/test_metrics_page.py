"""The metrics page on an address of its own, and what it says of the gate."""

from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from hisparsed.control.http_limits import Connections, Cut, HttpLimits
from hisparsed.daemon.gate import Gate
from hisparsed.daemon.metrics_page import (
    ConnectionCollector,
    GateCollector,
    metrics_app,
    metrics_page,
)
from hisparsed.daemon.session_door import Queue, SessionDoor
from hisparsed.engine.context_limit import ContextLimit


async def unused(scope: object, receive: object, send: object) -> None:
    raise AssertionError("the application must not be called")


async def test_metrics_are_at_their_path_without_a_redirect() -> None:
    registry = CollectorRegistry()
    door = SessionDoor(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
    gate = Gate(unused, door=door, metrics_page=lambda: b"")
    gate.counters.refused_session = 3
    registry.register(GateCollector(gate, ContextLimit()))
    connections = Connections(HttpLimits(), open=5)
    connections.cut[Cut.SLOW_HEADERS] = 2
    registry.register(ConnectionCollector(connections))
    transport = httpx.ASGITransport(app=metrics_app(lambda: metrics_page(registry)))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        page = await client.get("/metrics")
        assert page.status_code == 200
        assert (await client.get("/v1/models")).status_code == 404
    samples = {
        (sample.name, sample.labels.get("reason")): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    assert samples["hisparsed_refused_requests_total", "session-limit"] == 3
    assert samples["hisparsed_open_requests", None] == 0
    assert samples["hisparsed_open_connections", None] == 5
    assert samples["hisparsed_cut_connections_total", "slow-headers"] == 2
    assert samples["hisparsed_cut_connections_total", "malformed"] == 0
