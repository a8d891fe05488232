"""The fleet's rules name what exists, its alerts have their runbook, its files can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hisparsed.config.shipped import shipped_config
from hisparsed.control.metric_table import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = shipped_config("prometheus/rules.yaml").parent
FLEET = PROMETHEUS.parent / "fleet"
PAGE = (ROOT / "docs/fleet.md").read_text()


def rules(path: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


RULES = rules(FLEET / "rules.yaml")
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {
    rule["record"] for rule in (*RULES, *rules(PROMETHEUS / "rules.yaml")) if "record" in rule
}
_NAME = re.compile(r"(?<![\w:])((?:\w+:)?hisparsed_\w+(?::\w+)?)")


def test_rules_are_made_of_metrics_and_rules_that_exist() -> None:
    known = {metric.name for metric in METRICS} | RECORDED
    known |= {"hisparsed_node_info", "hisparsed_policy_info", "hisparsed_moves_total"}
    named = {name for rule in RULES for name in _NAME.findall(rule["expr"])}
    assert len(named) > 8, "the names were not found"
    assert named - known == set()


def test_what_sites_hand_up_exists() -> None:
    document = yaml.safe_load((FLEET / "federation.yaml").read_text())
    (job,) = document["scrape_configs"]
    plain = [text for text in job["params"]["match[]"] if "hisparsed_(" in text]
    (names,) = re.findall(r"hisparsed_\(([\w|]+)\)", plain[0])
    known = {metric.name for metric in METRICS} | {"hisparsed_node_info", "hisparsed_policy_info"}
    assert {f"hisparsed_{name}" for name in names.split("|")} - known == set()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_of_the_fleet_says_where_to_read_on(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert "$labels.cluster" in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"] == f"docs/fleet.md#{name.lower()}"
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in section, f"the page says nothing on {part} for {name}"


def test_the_router_of_a_cluster_finds_the_nodes_that_are_shipped() -> None:
    nodes = list(yaml.safe_load_all((FLEET.parent / "kubernetes/hisparsed.yaml").read_text()))
    (pods,) = [one["spec"]["template"] for one in nodes if one["kind"] == "StatefulSet"]
    labels = {f"{key}={value}" for key, value in pods["metadata"]["labels"].items()}
    ports = {port["containerPort"] for one in pods["spec"]["containers"] for port in one["ports"]}
    router = list(yaml.safe_load_all((FLEET / "kubernetes.yaml").read_text()))
    (pod,) = [one["spec"]["template"]["spec"] for one in router if one["kind"] == "Deployment"]
    args = pod["containers"][0]["args"]
    assert args[args.index("--selector") + 1] in labels
    (port,) = [int(arg.split("=")[1]) for arg in args if "service-discovery-port" in arg]
    assert port in ports


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees_with_the_fleet(tmp_path: Path) -> None:
    for folder in (PROMETHEUS, FLEET):
        shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / "targets.yaml").write_text("[]\n")
    for name in ("prometheus.yaml", "federation.yaml"):
        shutil.copy(FLEET / name, tmp_path)
        result = subprocess.run(
            ["promtool", "check", "config", name],  # noqa: S607
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
