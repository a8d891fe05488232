"""Dashboard, rules and alerts name only metrics, labels and reasons that exist; runbook and all."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from hisparsed.config.node import shipped_config
from hisparsed.control.api.http_server import Connections, Cut, HttpLimits
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.metrics.table import METRICS
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.cuda.nvml import SLOW_REASONS
from hisparsed.node.openai.admission import Admission
from hisparsed.node.openai.server import AdmissionCollector, ConnectionCollector
from hisparsed.node.openai.session_limit import Queue, SessionLimiter
from hisparsed.node.openai.upstream import How
from hisparsed.policy.decisions import Reason
from hisparsed.policy.signals import Lever

ROOT = Path(__file__).parents[2]
PROMETHEUS = shipped_config("prometheus/alerts.yaml").parent
DASHBOARD: dict[str, Any] = json.loads(shipped_config("grafana/hisparsed.json").read_text())
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
RULES = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())
RUNBOOK = (ROOT / "docs/runbook.md").read_text()

OF_EVERY_TARGET = {"up", "process_start_time_seconds"}
LABELS_OF_A_SCRAPE = {"instance", "job", "le"}
_NAME = re.compile(r"(?<![\w:$])((?:instance:)?hisparsed_\w+(?::\w+)?|vllm:\w+)")
_SELECTOR = re.compile(r"(hisparsed_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def rules(document: Any) -> list[dict[str, Any]]:
    return [rule for group in document["groups"] for rule in group["rules"]]


def panel_expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["expr"] for one in DASHBOARD["annotations"]["list"])


def expressions() -> list[str]:
    return [*(rule["expr"] for rule in (*rules(ALERTS), *rules(RULES))), *panel_expressions()]


def labels_by_metric() -> dict[str, set[str]]:
    """Of every series that the daemon's own registries have, by the series' name."""

    async def unused(*_: object) -> None: ...

    def no_status() -> NoReturn:
        raise AssertionError("names need no status")

    sessions = SessionLimiter(clock=lambda: 0.0, queue=lambda: Queue(0, 0, 8))
    admission = Admission(unused, sessions=sessions, metrics_page=unused)
    calls = AdmissionCollector(admission, ContextLimit(), {How.CUT: 4})
    found: dict[str, set[str]] = {}
    connections = ConnectionCollector(Connections(HttpLimits()))
    for family in (*calls.collect(), *connections.collect()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    metrics = ControlMetrics(no_status)
    for family in (*metrics._tick.describe(), *metrics._apply.describe()):
        suffix = "_total" if family.type == "counter" else ""
        found.setdefault(family.name + suffix, set())
        if family.type == "histogram":
            found.update({f"{family.name}_{part}": set() for part in ("bucket", "sum", "count")})
    for family in metrics.describe():
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
    found.update({metric.name: set(metric.labels) for metric in METRICS})
    found["hisparsed_moves_total"] = {"lever", "direction", "reason"}
    found["hisparsed_holds_total"] = {"lever", "reason"}
    return found


def vllm_series() -> set[str]:
    """Names that the installed vLLM may expose, read from its source without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    text = "".join(path.read_text() for path in (folder / "v1/metrics").glob("*.py"))
    names = set(re.findall(r'"(vllm:\w+)"', text))
    return {name + suffix for name in names for suffix in ("", "_total", "_bucket", "_count")}


OWN = labels_by_metric()


def test_every_metric_that_is_named_exists() -> None:
    recorded = {rule["record"] for rule in rules(RULES)}
    known = OWN.keys() | recorded | vllm_series()
    named = {name for text in expressions() for name in _NAME.findall(text)}
    assert len(named) > 50, "the names were not found"
    assert named - known == set()


def test_every_label_and_value_that_is_matched_exists() -> None:
    values = {"lever": set(Lever), "reason": set(Reason), "pool": {"hisparse", "offload"}}
    values["reason"] |= {"draining", "session-limit", "body-size", "max-context", *Cut}
    values["reason"] |= set(SLOW_REASONS.values())
    matched = 0
    for text in expressions():
        for name, selector in _SELECTOR.findall(text):
            for label, operator, value in _MATCHER.findall(selector):
                assert label in OWN[name] | LABELS_OF_A_SCRAPE, f"{name} has no label {label}"
                if label in values and operator in ("=", "!="):
                    assert value in values[label], f"{name}: {label} is never {value}"
                    matched += 1
    assert matched > 0


def test_the_dashboard_shows_every_metric_of_the_daemon() -> None:
    shown = " ".join((*panel_expressions(), *(rule["expr"] for rule in rules(RULES))))
    without = {
        "hisparsed_hot_references_total",  # the sum of hisparsed_hot_rows_total
        "hisparsed_policy_info",  # a hash, for joins
        "hisparsed_requests_held_total",  # hisparsed_held_requests is shown
    }
    missing = {metric.name for metric in METRICS if metric.name not in shown} - without
    assert missing == set()


def test_panels_are_complete_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all("$instance" in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("alert", rules(ALERTS), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_whom_to_wake_and_where_to_read_on(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert "$labels.instance" in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in section, f"the runbook says nothing on {part} for {name}"


def test_the_runbook_has_no_alert_that_does_not_exist() -> None:
    described = set(re.findall(r"^### (Hisparsed\w+)$", RUNBOOK, re.MULTILINE))
    assert described == {rule["alert"] for rule in rules(ALERTS)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees(tmp_path: Path) -> None:
    for path in (*PROMETHEUS.glob("*.yaml"), Path(__file__).with_name("alerts_test.yaml")):
        shutil.copy(path, tmp_path)
    for command in (
        ["check", "rules", "alerts.yaml", "rules.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        result = subprocess.run(
            ["promtool", *command],  # noqa: S607
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
