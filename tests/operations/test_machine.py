"""Leaked memory files: the kernel distinguishes them from live ones, and only they are removed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hisparsed.node.engine.shared_memory import SharedMemoryRecord, files_there
from hisparsed.operations.machine import ShmFile, reserved_huge_pages, shared_files, sweep

PAGE = mmap.PAGESIZE


@pytest.fixture
def leak(tmp_path: Path) -> Path:
    path = tmp_path / "vllm_offload_hisparse_a_dp0.mmap"
    path.write_bytes(b"x" * PAGE)
    return path


def files_in(folder: Path) -> list[ShmFile]:
    return shared_files(folder, folder / "state")


def held(path: Path) -> bool | None:
    (found,) = files_in(path.parent)
    return found.held


def test_a_file_that_nobody_has_open_is_dead(leak: Path) -> None:
    (found,) = files_in(leak.parent)
    assert (found.path, found.size_bytes, found.held) == (leak, PAGE, False)
    assert sweep(found)
    assert not leak.exists()


def test_an_open_file_is_alive(leak: Path) -> None:
    with leak.open("rb+"):
        assert held(leak) is True
    assert held(leak) is False


def test_a_mapping_keeps_a_file_alive_after_it_was_closed(leak: Path) -> None:
    with leak.open("rb+") as file:
        mapped = mmap.mmap(file.fileno(), PAGE)
    try:
        assert held(leak) is True
        assert not sweep(ShmFile(leak, PAGE, False)), "it became alive since it was looked at"
        assert leak.exists()
    finally:
        mapped.close()
    assert held(leak) is False


def test_a_mapping_in_another_process_keeps_a_file_alive(leak: Path) -> None:
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb+') as file: kept = mmap.mmap(file.fileno(), 4096)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(leak)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "mapped\n"
        assert held(leak) is True
        engine.communicate("")
    assert held(leak) is False


def test_who_opens_a_file_while_it_is_looked_at_ends_nobody(leak: Path) -> None:
    """The kernel signals the holder of a lease; here in a thread, as of a daemon."""
    code = (
        "import os, sys, threading\n"
        "from hisparsed.node.engine.shared_memory import _only_holder, _opened\n"
        "def look():\n"
        "    with _opened(sys.argv[1]) as number, _only_holder(number) as alone:\n"
        "        try:\n"
        "            os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)\n"
        "        except BlockingIOError:\n"
        "            print('alone' if alone else 'not alone', flush=True)\n"
        "one = threading.Thread(target=look)\n"
        "one.start()\n"
        "one.join()\n"
    )
    looked = subprocess.run(
        [sys.executable, "-c", code, str(leak)], capture_output=True, text=True, check=False
    )
    assert (looked.returncode, looked.stdout) == (0, "alone\n"), looked.stderr


def test_other_files_are_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "sem.other").touch()
    assert files_in(tmp_path) == []


def test_what_a_killed_engine_had_recorded_is_found_too(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"hisparsed-test-{os.getpid()}"  # noqa: S108 (shared memory)
    path.touch()
    try:
        SharedMemoryRecord(tmp_path).add(
            frozenset(one for one in files_there() if one.path == str(path))
        )
        (found,) = shared_files(tmp_path, tmp_path)
        assert (found.path, found.held) == (path, False)
        assert sweep(found)
        assert shared_files(tmp_path, tmp_path) == []
    finally:
        path.unlink(missing_ok=True)


def test_a_link_is_not_followed(tmp_path: Path, leak: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    leak.unlink()
    leak.symlink_to(precious)
    assert held(leak) is None
    assert not sweep(ShmFile(leak, 0, False))
    assert precious.exists()


def test_what_is_gone_already_counts_as_swept(tmp_path: Path) -> None:
    assert sweep(ShmFile(tmp_path / "vllm_offload_gone.mmap", 0, False))


def test_looking_leaves_the_file_as_it_was(leak: Path) -> None:
    before = leak.stat()
    files_in(leak.parent)
    after = leak.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    os.close(os.open(leak, os.O_RDWR))  # no lease is left that would hold this up


def test_huge_pages_that_are_set_aside_are_counted_by_size(tmp_path: Path) -> None:
    for name, reserved, free in (("2048kB", 512, 100), ("1048576kB", 2, 2)):
        pool = tmp_path / f"hugepages-{name}"
        pool.mkdir()
        (pool / "nr_hugepages").write_text(f"{reserved}\n")
        (pool / "free_hugepages").write_text(f"{free}\n")
    assert reserved_huge_pages(tmp_path) == (3 * 2**30, 200 * 2**20 + 2 * 2**30)
    assert reserved_huge_pages(tmp_path / "none") == (0, 0)
