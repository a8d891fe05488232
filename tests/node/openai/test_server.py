"""Which paths are served, and the metrics page on its own address."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hisparsed.control.api.http_server import Connections, Cut, HttpLimits
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.node.openai.admission import Admission
from hisparsed.node.openai.metrics_page import MetricsPage, metrics_app
from hisparsed.node.openai.server import (
    SERVED,
    AdmissionCollector,
    ConnectionCollector,
    ServedPaths,
    is_served,
)
from hisparsed.node.openai.session_limit import Queue, SessionLimiter
from hisparsed.node.openai.upstream import How


@pytest.mark.parametrize(
    "path", [*SERVED, "/v1/chat/completions/batch", "/v1/responses/resp_1/cancel"]
)
def test_calls_and_what_is_below_them_are_served(path: str) -> None:
    assert is_served(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/completions2",
        "/v1/load_lora_adapter",
        "/collective_rpc",
        "/sleep",
        "/inference/v1/abort_requests",
        "/scale_elastic_ep",
        "/static/x",
        "//v1/completions",
        "/V1/COMPLETIONS",
    ],
)
async def test_what_is_not_in_the_list_is_not_found_though_it_is_mounted(path: str) -> None:
    async def answer(request: Request) -> JSONResponse:
        raise AssertionError(f"reached {request.url.path}")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(app=ServedPaths(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        refused = await client.post(f"http://node{path}", json={})
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found"


async def unused(scope: object, receive: object, send: object) -> None:
    raise AssertionError("the application must not be called")


async def test_metrics_are_at_their_path_without_a_redirect() -> None:
    registry = CollectorRegistry()
    sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
    admission = Admission(unused, sessions=sessions, metrics_page=unused)
    admission.counters.refused_session = 3
    context = ContextLimit()
    sessions.held_total, context.held_total = 1, 2
    registry.register(AdmissionCollector(admission, context, {How.CUT: 4}))
    connections = Connections(HttpLimits(), open=5)
    connections.cut[Cut.SLOW_HEADERS] = 2
    registry.register(ConnectionCollector(connections))
    transport = httpx.ASGITransport(app=metrics_app(MetricsPage(registry)))
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
    assert 'hisparsed_ended_requests_total{how="cut"} 4.0' in page.text
    assert samples["hisparsed_open_requests", None] == 0
    assert samples["hisparsed_requests_held_total", None] == 3, "by both limits"
    assert samples["hisparsed_open_connections", None] == 5
    assert samples["hisparsed_cut_connections_total", "slow-headers"] == 2
    assert samples["hisparsed_cut_connections_total", "malformed"] == 0
