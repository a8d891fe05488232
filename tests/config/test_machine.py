"""The limits of the machine: memory as cgroups count it, and the kind of node by its GPUs."""

from pathlib import Path

import psutil
import pytest

from hisparsed.config import machine
from hisparsed.config.machine import (
    available_memory_bytes,
    cgroups_of,
    detect_node_kind,
    machine_memory_bytes,
)
from hisparsed.config.node import NodeConfig
from hisparsed.errors import UserError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.write_text("0::/a/b\n")
    return path


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def limits(root: Path, own: Path) -> list[int]:
    return [one.limit_bytes for one in cgroups_of(root, own)]


def test_the_limits_of_all_parents(tmp_path: Path, own: Path) -> None:
    put(tmp_path / "root/a/b", memory__max="max")
    put(tmp_path / "root/a", memory__max="3000")
    put(tmp_path / "root", memory__max="5000")
    assert limits(tmp_path / "root", own) == [3000, 5000]


def test_no_limit(tmp_path: Path, own: Path) -> None:
    put(tmp_path / "root/a/b", memory__max="max")
    assert cgroups_of(tmp_path / "root", own) == []
    assert cgroups_of(tmp_path / "none", own) == []
    assert cgroups_of(tmp_path / "root", tmp_path / "missing") == []


def test_nothing_above_the_root_is_read(tmp_path: Path, own: Path) -> None:
    put(tmp_path, memory__max="1")
    put(tmp_path / "root/a", memory__max="3000")
    assert limits(tmp_path / "root", own) == [3000]


def test_version_one(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu:/c\n4:memory:/c\n")
    stat = "cache 900\ntotal_inactive_file 200\ntotal_active_file 100\n"
    put(
        tmp_path / "root/memory/c",
        memory__limit_in_bytes="2000",
        memory__usage_in_bytes="1500",
        memory__stat=stat,
    )
    put(tmp_path / "root/cpu/c", memory__limit_in_bytes="7")
    (found,) = cgroups_of(tmp_path / "root", own)
    assert (found.limit_bytes, found.used_bytes, found.room_bytes) == (2000, 1200, 800)


def test_what_others_in_a_cgroup_have_taken_is_gone_but_not_the_file_cache(
    tmp_path: Path, own: Path
) -> None:
    root = tmp_path / "root"
    put(
        root / "a/b",
        memory__max="3000",
        memory__current="1000",
        memory__stat="anon 400\nfile 600\ninactive_file 300\nactive_file 100\nshmem 200",
    )
    put(root / "a", memory__max="4000", memory__current="3900", memory__stat="torn")
    put(root, memory__current="7")
    assert [one.room_bytes for one in cgroups_of(root, own)] == [2400, 100]


def test_a_cgroup_above_its_limit_has_no_room(tmp_path: Path, own: Path) -> None:
    put(tmp_path / "root/a", memory__max="100", memory__current="300")
    (found,) = cgroups_of(tmp_path / "root", own)
    assert found.room_bytes == 0


def test_the_nearest_cgroup_decides_what_is_available(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "root/a/b", memory__max="2000000", memory__current="1200000")
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path / "root")
    monkeypatch.setattr(machine, "_OWN_CGROUP", own)
    assert machine_memory_bytes() == 2_000_000
    assert available_memory_bytes() == 800_000


def test_machine_memory_is_at_most_its_ram() -> None:
    assert 0 < machine_memory_bytes() <= psutil.virtual_memory().total
    assert 0 < available_memory_bytes() <= machine_memory_bytes()


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
