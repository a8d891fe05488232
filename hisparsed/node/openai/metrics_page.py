"""The metrics page: vLLM's metrics and the daemon's, in the form that the scraper asks for.

Prometheus' text format, or OpenMetrics where ``Accept`` prefers it; gzip where ``Accept-Encoding``
takes it. Unknown headers get the plain text. While no engine serves, gauges of vLLM are omitted:
they would show the load that the last engine had before it ended.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.applications import Starlette
from starlette.routing import Route

from hisparsed.node.openai.errors import App, Receive, Send, answer

OPENMETRICS: Final = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN: Final = b"text/plain; version=0.0.4; charset=utf-8"
_OF_ENGINE: Final = "vllm:"
_GZIP_LEVEL: Final = 5
_openmetrics: Any = openmetrics.generate_latest
_VARY: Final = (b"vary", b"accept, accept-encoding")


class MetricsPage:
    """An ASGI application. ``registry`` has the daemon's metrics, the process-wide one vLLM's;
    ``serves`` says whether there is an engine."""

    def __init__(
        self, registry: CollectorRegistry, *, serves: Callable[[], bool] = lambda: True
    ) -> None:
        self._registry = registry
        self._serves = serves

    async def __call__(self, scope: MutableMapping[str, Any], _: Receive, send: Send) -> None:
        if prefers_openmetrics(_header(scope, b"accept")):
            # With any other way of escaping the library writes `vllm_` for `vllm:` here.
            page, form = _openmetrics(self, openmetrics.ALLOWUTF8), OPENMETRICS
        else:
            page, form = generate_latest(self), PLAIN
        more = [_VARY]
        if takes_gzip(_header(scope, b"accept-encoding")):
            page = gzip.compress(page, _GZIP_LEVEL)
            more.append((b"content-encoding", b"gzip"))
        await answer(send, 200, page, form, more)

    def collect(self) -> Iterator[Metric]:
        """Every family, vLLM's first."""
        serves = self._serves()
        for family in REGISTRY.collect():
            if serves or family.type != "gauge" or not family.name.startswith(_OF_ENGINE):
                yield family
        yield from self._registry.collect()


def metrics_app(page: App) -> Starlette:
    """``/metrics`` for its own address; everything else is not found there."""
    return Starlette(routes=[Route("/metrics", page)])


def prefers_openmetrics(accept: str) -> bool:
    """Whether an ``Accept`` header ranks version 1 of it as high as plain text, or higher."""
    ranked = _ranked(accept)
    form = max(
        (
            rank
            for (kind, version), rank in ranked.items()
            if kind == "application/openmetrics-text" and version in ("", "1.0.0")
        ),
        default=0.0,
    )
    plain = (rank for (kind, _), rank in ranked.items() if kind in ("text/plain", "text/*"))
    return form > 0 and form >= max(plain, default=0.0)


def takes_gzip(accept_encoding: str) -> bool:
    return any(
        kind in ("gzip", "x-gzip", "*") and rank > 0
        for (kind, _), rank in _ranked(accept_encoding).items()
    )


def _header(scope: MutableMapping[str, Any], name: bytes) -> str:
    """All headers of that name as one."""
    return b",".join(value for one, value in scope["headers"] if one == name).decode("latin-1")


def _ranked(header: str) -> Mapping[tuple[str, str], float]:
    """Entries of an ``Accept*`` header by name and version, with their quality."""
    found: dict[tuple[str, str], float] = {}
    for entry in header.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        given = dict(one.partition("=")[::2] for one in parameters)
        found[kind, given.get("version", "").strip('"')] = _quality(given.get("q", "1"))
    return found


def _quality(text: str) -> float:
    """0 for text that is not a number and for encodings that are not wanted."""
    try:
        rank = float(text)
    except ValueError:
        return 0.0
    return rank if 0 <= rank <= 1 else 0.0
