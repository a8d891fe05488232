"""The memory a node may use: the lowest cgroup limit on the way up, v2 and v1."""

from pathlib import Path

import psutil
import pytest

from hisparsed.config.memory import cgroup_limit_bytes, machine_memory_bytes


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
