"""What this machine allows: the lowest cgroup limit, and the kind of node by its GPUs."""

from pathlib import Path

import psutil
import pytest

from hisparsed.config.machine import cgroup_limit_bytes, detect_node_kind, machine_memory_bytes
from hisparsed.config.node import NodeConfig
from hisparsed.errors import UserError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.write_text("0::/a/b\n")
    return path


def limit(root: Path, folder: str, text: str, name: str = "memory.max") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / name).write_text(text)


def test_lowest_limit_of_all_parents(tmp_path: Path, own: Path) -> None:
    limit(tmp_path, "root/a/b", "max\n")
    limit(tmp_path, "root/a", "3000\n")
    limit(tmp_path, "root", "5000\n")
    assert cgroup_limit_bytes(tmp_path / "root", own) == 3000


def test_no_limit(tmp_path: Path, own: Path) -> None:
    limit(tmp_path, "root/a/b", "max\n")
    assert cgroup_limit_bytes(tmp_path / "root", own) is None
    assert cgroup_limit_bytes(tmp_path / "none", own) is None
    assert cgroup_limit_bytes(tmp_path / "root", tmp_path / "missing") is None


def test_nothing_above_the_root_is_read(tmp_path: Path, own: Path) -> None:
    limit(tmp_path, ".", "1\n")
    limit(tmp_path, "root/a", "3000\n")
    assert cgroup_limit_bytes(tmp_path / "root", own) == 3000


def test_version_one(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu:/c\n4:memory:/c\n")
    limit(tmp_path, "root/memory/c", "2000\n", "memory.limit_in_bytes")
    limit(tmp_path, "root/cpu/c", "7\n", "memory.limit_in_bytes")
    assert cgroup_limit_bytes(tmp_path / "root", own) == 2000


def test_machine_memory_is_at_most_its_ram() -> None:
    assert 0 < machine_memory_bytes() <= psutil.virtual_memory().total


EIGHT = ["NVIDIA H200"] * 8


def config(node: str, model: str | None = None) -> NodeConfig:
    return NodeConfig.model_validate({"node": node, "model": model, "host_budget": "1GiB"})


def never() -> list[str]:
    raise AssertionError("the GPUs must not be asked for")


def test_auto_with_gpus_is_cuda() -> None:
    detected = detect_node_kind(config("auto", "glm"), lambda: EIGHT)
    assert detected.kind == "cuda"
    assert detected.banner == "CUDA node: glm on 8x NVIDIA H200."


def test_auto_without_gpus_is_reference_and_says_so() -> None:
    detected = detect_node_kind(config("auto", "glm"), list)
    assert detected.kind == "reference"
    assert detected.banner.startswith("Reference node: no NVIDIA GPU was found. A small model of")


def test_auto_with_gpus_needs_a_model() -> None:
    with pytest.raises(UserError, match="found 8x NVIDIA H200, but no model is configured"):
        detect_node_kind(config("auto"), lambda: EIGHT)


def test_cuda_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="no NVIDIA GPU can be seen; check nvidia-smi"):
        detect_node_kind(config("cuda", "glm"), list)


@pytest.mark.parametrize("kind", ["reference", "simulated"])
def test_named_kinds_do_not_ask_for_gpus(kind: str) -> None:
    assert detect_node_kind(config(kind), never).kind == kind


def test_mixed_gpus_are_counted() -> None:
    detected = detect_node_kind(config("auto", "m"), lambda: ["A", "B", "A"])
    assert detected.banner == "CUDA node: m on 2x A, 1x B."
