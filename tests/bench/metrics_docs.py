"""Makes docs/metrics.md: every metric of a fresh registry, with labels and help.

``python -m tests.bench.metrics_docs > docs/metrics.md``; a test keeps the page current.
"""

from __future__ import annotations

from typing import NoReturn

from hisparsed.control.api.http_server import Cut
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.metrics.table import METRICS
from hisparsed.node.openai.upstream import How


def _no_status() -> NoReturn:
    raise RuntimeError("describing metrics reads no status")


def metrics_document() -> str:
    """docs/metrics.md: every metric of a fresh registry, with labels and help."""
    metrics = ControlMetrics(_no_status)
    rows = []
    described = [*metrics.describe(), *metrics._tick.describe(), *metrics._apply.describe()]
    labels = {metric.name: metric.labels for metric in METRICS} | {
        "hisparsed_moves_total": ("lever", "direction", "reason"),
        "hisparsed_holds_total": ("lever", "reason"),
    }
    for family in sorted(described, key=lambda family: family.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = ", ".join(f"`{label}`" for label in labels.get(name, ())) or "-"
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return _HEAD.replace("{cuts}", _CUTS).replace("{hows}", _HOWS) + "\n".join(rows) + "\n"


_CUTS = ", ".join(f"`{cut.value}`" for cut in Cut)
_HOWS = ", ".join(f"`{how.value}`" for how in How)
_HEAD = """# Metrics

*Reference.* [All pages](README.md)

`/metrics` serves these beside vLLM's own. Units are base units: bytes, seconds, tokens, blocks;
a ratio is 1 for the whole. A reading that is not known yet is left out. This page is written by
`python -m tests.bench.metrics_docs > docs/metrics.md`.

Admission to the OpenAI API adds `hisparsed_open_requests`, `hisparsed_held_requests`
(gauges), `hisparsed_requests_held_total`, `hisparsed_refused_requests_total` (counters; label
`reason`: `draining`, `engine`, `session-limit`, `max-context`, `body-size` or `answers`) and
`hisparsed_ended_requests_total` (counter; label `how`: {hows}): `cancelled` is a client that went
away, `cut` an engine that ended or a drain that was over, `failed` an error of vLLM's. Its listener
adds `hisparsed_open_connections` (gauge) and `hisparsed_cut_connections_total` (counter; label
`reason`: {cuts}).

The daemon's own counters go on over restarts of the engine. What an engine counts (vLLM's series,
and those of pools, rows, requests, tokens, ticks and the canary) begins at 0 with each engine, as
Prometheus expects of a restarted process: `rate()` and `increase()` see through it. While there is
no engine the last readings stay; `hisparsed_engine_state` says so.

| Name | Type | Labels | Meaning |
| --- | --- | --- | --- |
"""

if __name__ == "__main__":
    import sys

    sys.stdout.write(metrics_document())
