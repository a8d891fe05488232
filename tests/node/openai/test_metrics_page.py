"""The form of the metrics page follows the scraper's headers; a dead engine shows no load."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hisparsed.node.openai.metrics_page import (
    MetricsPage,
    metrics_app,
    prefers_openmetrics,
    takes_gzip,
)

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; version="1.0.0"', True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.1", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.8", False),
        ("application/openmetrics-text;q=\u00bd;version", False),
        (";,;q=nan,;;=", False),
        ("application/openmetrics-text;q=1e999", False),
    ],
)
def test_the_form_is_the_one_ranked_first(accept: str, openmetrics: bool) -> None:
    assert prefers_openmetrics(accept) == openmetrics


@pytest.mark.parametrize(
    ("encodings", "packed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0, identity", False),
        ("br", False),
    ],
)
def test_it_is_packed_for_who_takes_it(encodings: str, packed: bool) -> None:
    assert takes_gzip(encodings) == packed


@pytest.fixture
def of_an_engine() -> Iterator[None]:
    """The metrics that vLLM leaves in the process-wide registry, also those of an engine that has
    gone."""
    load = Gauge("vllm:test_running", "Load.")
    load.set(7)
    tokens = Counter("vllm:test_tokens", "Tokens.")
    tokens.inc(3)
    yield
    REGISTRY.unregister(load)
    REGISTRY.unregister(tokens)


@pytest.mark.usefixtures("of_an_engine")
async def test_gauges_of_an_engine_end_with_it_and_its_counters_stay() -> None:
    registry = CollectorRegistry()
    Gauge("hisparsed_test", "Ours.", registry=registry)
    serves = True
    app = metrics_app(MetricsPage(registry, serves=lambda: serves))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://node"
    ) as http:
        assert "vllm:test_running 7.0" in (await http.get("/metrics")).text
        serves = False
        page = await http.get("/metrics", headers={"accept": PROMETHEUS_3})
        raw = await http.send(
            http.build_request("GET", "/metrics", headers={"accept-encoding": "gzip"}), stream=True
        )
        packed = b"".join([part async for part in raw.aiter_raw()])
    families = {one.name: one.samples for one in text_string_to_metric_families(page.text)}
    assert "vllm:test_running" not in families
    assert families["vllm:test_tokens"][0].value == 3
    assert "hisparsed_test" in families
    assert b"hisparsed_test" in gzip.decompress(packed)
