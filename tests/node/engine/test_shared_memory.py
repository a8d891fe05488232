"""Which files in /dev/shm a dead engine leaves, and which of them are removed."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hisparsed.node.engine.processes import ProcessesSince
from hisparsed.node.engine.shared_memory import (
    FILE_NAME,
    SharedMemoryRecord,
    files_there,
    mapped_by,
)

SHM = Path("/dev/shm")  # noqa: S108 (shared memory)
ENGINE = """
import mmap, signal, sys
from multiprocessing.shared_memory import SharedMemory

queue = SharedMemory(create=True, size=4096)
with open(sys.argv[1], "rb+") as file:
    weights = mmap.mmap(file.fileno(), 4096)
print(queue.name, flush=True)
signal.pause()
"""
"""Makes a queue as vLLM does, under a random name, and maps a file that was there before."""


@pytest.fixture
def make() -> Iterator[Callable[..., Path]]:
    """Makes a page in /dev/shm, or in a folder there."""
    made = [SHM / f"hisparsed-test-{uuid4().hex}"]

    def page(*, folder: bool = False) -> Path:
        path = made[0] / "weights" if folder else SHM / f"hisparsed-test-{uuid4().hex}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(mmap.PAGESIZE))
        made.append(path)
        return path

    yield page
    for path in made[1:]:
        path.unlink(missing_ok=True)
    shutil.rmtree(made[0], ignore_errors=True)


@pytest.fixture
def weights(make: Callable[..., Path]) -> Path:
    return make()


@pytest.fixture
def engine(weights: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process group that shares memory, and the name of the memory."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(weights)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        queue = SHM / process.stdout.readline().strip()
        yield process, queue
        if process.poll() is None:
            kill(process)
    queue.unlink(missing_ok=True)


def kill(engine: subprocess.Popen[str]) -> None:
    """With its resource tracker, which would unlink the queue."""
    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()


def recorded(folder: Path, *paths: Path) -> SharedMemoryRecord:
    """As the next daemon on ``folder`` reads it."""
    wanted = {str(path) for path in paths}
    SharedMemoryRecord(folder).add(frozenset(one for one in files_there() if one.path in wanted))
    return SharedMemoryRecord(folder)


def test_what_a_killed_group_leaves_is_removed_and_only_then(
    tmp_path: Path, engine: tuple[subprocess.Popen[str], Path], weights: Path
) -> None:
    process, queue = engine
    SharedMemoryRecord(tmp_path).add(
        frozenset(one for one in mapped_by(process.pid) if one.path != str(weights))
    )
    record = SharedMemoryRecord(tmp_path)
    assert [one.path for one in record.left()] == [str(queue)]
    assert record.remove() == [], "the engine still uses it"
    assert queue.exists()
    kill(process)
    assert queue.exists(), "nobody else removes it"
    assert record.remove() == [str(queue)]
    assert not queue.exists()
    assert record.remove() == []
    assert record.left() == frozenset()


def test_an_engine_s_shared_memory_is_what_it_made_and_no_file_that_was_there(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = make(), []
    since = ProcessesSince(seen.append)
    after, gone, below = make(), make(), make(folder=True)
    pages = []
    for path in (before, after, gone, below):
        with path.open("rb+") as file:
            pages.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    gone.unlink()
    monkeypatch.setattr(since, "_roots", {os.getpid(): None})
    looked = since.look().shared
    for page in pages:
        page.close()
    assert [one.path for one in looked] == [str(after)]
    assert seen == [looked]


def test_a_later_file_of_the_same_name_stays(tmp_path: Path, make: Callable[..., Path]) -> None:
    path = make()
    record = recorded(tmp_path, path)
    kept = path.open("rb")  # or its inode number may be used again
    path.unlink()
    path.write_bytes(b"another program's")
    kept.close()
    assert record.left() == frozenset()
    assert record.remove() == []
    assert path.exists()


def test_a_file_that_any_process_maps_stays(tmp_path: Path, make: Callable[..., Path]) -> None:
    path = make()
    record = recorded(tmp_path, path)
    with path.open("rb+") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    assert record.remove() == []
    page.close()
    assert record.remove() == [str(path)]


def test_a_second_engine_s_files_join_what_the_first_left(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    first, gone, second = make(), make(), make()
    recorded(tmp_path, first, gone)
    gone.unlink()
    recorded(tmp_path, second)
    document = json.loads((tmp_path / FILE_NAME).read_text())
    assert {one["path"] for one in document["files"]} == {str(first), str(second)}


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another"},
        {"version": 2},
        {"files": [{"path": "/etc/passwd"}]},
    ],
)
def test_a_record_of_another_boot_or_form_names_nothing(
    tmp_path: Path, make: Callable[..., Path], change: dict[str, object]
) -> None:
    path = make()
    recorded(tmp_path, path)
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert SharedMemoryRecord(tmp_path).remove() == []
    assert path.exists()


def test_a_record_removes_nothing_outside_shared_memory(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    precious, nested = tmp_path / "precious", make(folder=True)
    precious.touch()
    recorded(tmp_path, make())
    file = tmp_path / FILE_NAME
    document = json.loads(file.read_text())
    document["files"] = [
        {"path": str(path), "device": path.stat().st_dev, "inode": path.stat().st_ino}
        for path in (precious, nested)
    ]
    file.write_text(json.dumps(document))
    assert SharedMemoryRecord(tmp_path).remove() == []
    assert precious.exists()
    assert nested.exists()


def test_a_record_that_cannot_be_written_is_logged(
    tmp_path: Path, make: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    make()
    SharedMemoryRecord(tmp_path / "missing").add(files_there())
    assert "cannot be written" in caplog.text
