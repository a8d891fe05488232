"""Fleet rules and the Kubernetes manifest: they name what exists, and hisparsed accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hisparsed.config.node import NodeConfig, load_node_config, shipped_config
from hisparsed.control.metrics.table import METRICS
from hisparsed.node.engine.values import engine_stop_s, start_limit_s
from hisparsed.policy.effective import load_policy
from hisparsed.policy.units import parse_bytes

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


PARTS = {
    part["kind"]: part
    for part in yaml.safe_load_all(shipped_config("kubernetes/hisparsed.yaml").read_text())
}
POD = PARTS["StatefulSet"]["spec"]["template"]["spec"]
(NODE,) = POD["containers"]


def document(tmp_path: Path) -> NodeConfig:
    data = PARTS["ConfigMap"]["data"]
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o440)  # as the manifest mounts it
    text = data["hisparsed.yaml"].replace("/etc/hisparsed-keys/api-keys", str(tmp_path / "keys"))
    path = tmp_path / "hisparsed.yaml"
    path.write_text(text)
    return load_node_config(path, memory_bytes=2**42).value


def size(text: str) -> int:
    return parse_bytes(text if text.endswith("B") else f"{text}B")


def probe_s(probe: dict[str, Any]) -> int:
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


def test_its_documents_are_valid(tmp_path: Path) -> None:
    assert document(tmp_path).node == "cuda"
    policy = tmp_path / "policy.yaml"
    policy.write_text(PARTS["ConfigMap"]["data"]["policy.yaml"])
    load_policy(policy)


def test_memory_and_shared_memory_hold_the_budget(tmp_path: Path) -> None:
    budget = document(tmp_path).host_budget
    (shm,) = (one["emptyDir"] for one in POD["volumes"] if one["name"] == "shm")
    assert size(shm["sizeLimit"]) > budget
    assert size(NODE["resources"]["limits"]["memory"]) > size(shm["sizeLimit"])
    assert "IPC_LOCK" in NODE["securityContext"]["capabilities"]["add"]


def test_it_waits_as_long_as_the_daemon_may_take(tmp_path: Path) -> None:
    config = document(tmp_path)
    stop_s = config.drain_timeout + engine_stop_s(config)
    assert POD["terminationGracePeriodSeconds"] >= stop_s
    assert probe_s(NODE["startupProbe"]) >= start_limit_s(config)


def test_a_busy_node_is_taken_out_of_service_and_not_restarted() -> None:
    assert NODE["readinessProbe"]["exec"]["command"][-1].endswith("/readyz")
    assert NODE["livenessProbe"]["exec"]["command"][-1].endswith("/healthz")
    assert probe_s(NODE["livenessProbe"]) >= 180


def test_the_doctor_sees_what_the_node_will_see() -> None:
    (doctor,) = POD["initContainers"]
    assert doctor["command"][:2] == ["hisparsed", "doctor"]
    for what in ("resources", "volumeMounts", "image"):
        assert doctor[what] == NODE[what]
