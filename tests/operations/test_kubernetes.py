"""The manifest: documents that hisparsed itself accepts, and room for what a node does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hisparsed.config.node import NodeConfig, load_node_config
from hisparsed.config.shipped import shipped_config
from hisparsed.daemon.patience import engine_stop_s, start_limit_s
from hisparsed.policy.effective import load_policy
from hisparsed.policy.units import parse_bytes

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
    stop_s = config.drain_timeout + engine_stop_s(config.host_budget)
    assert POD["terminationGracePeriodSeconds"] >= stop_s
    assert probe_s(NODE["startupProbe"]) >= start_limit_s(config.host_budget)


def test_a_busy_node_is_taken_out_of_service_and_not_restarted() -> None:
    assert NODE["readinessProbe"]["exec"]["command"][-1].endswith("/readyz")
    assert NODE["livenessProbe"]["exec"]["command"][-1].endswith("/healthz")
    assert probe_s(NODE["livenessProbe"]) >= 180


def test_the_doctor_sees_what_the_node_will_see() -> None:
    (doctor,) = POD["initContainers"]
    assert doctor["command"][:2] == ["hisparsed", "doctor"]
    for what in ("resources", "volumeMounts", "image"):
        assert doctor[what] == NODE[what]
