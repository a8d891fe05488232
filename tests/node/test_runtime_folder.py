"""The folder of one run of the daemon: all parts use it, and none leaves files."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hisparsed.errors import UserError
from hisparsed.node import resources
from hisparsed.node.resources import runtime_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its name is short enough for sockets below it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_temporary_files_go_into_it_and_nothing_stays(state_dir: Path, temporary: Path) -> None:
    with runtime_folder(state_dir) as folder:
        assert folder.parent == temporary
        Path(tempfile.mkdtemp()).joinpath("socket").touch()
        assert list(folder.glob("*/socket"))
    assert not list(temporary.iterdir())
    assert not list(state_dir.iterdir())
    assert tempfile.gettempdir() == str(temporary)


def test_what_a_killed_daemon_left_is_removed_by_the_next(state_dir: Path, temporary: Path) -> None:
    killed = runtime_folder(state_dir)
    left = killed.__enter__()
    (left / "socket").touch()
    tempfile.tempdir = str(temporary)
    with runtime_folder(state_dir) as folder:
        assert [one.name for one in temporary.iterdir()] == [folder.name]
        assert folder != left


@pytest.mark.parametrize("name", ["precious", "", "relative/hisparsed-run-x", "\x00"])
def test_a_damaged_note_removes_nothing_of_others(
    state_dir: Path, tmp_path: Path, name: str
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    named = str(tmp_path / name) if name == "precious" else name
    (state_dir / "runtime-folder").write_text(named, encoding="utf-8")
    with runtime_folder(state_dir):
        assert (precious / "file").exists()


def test_where_its_name_is_too_long_for_sockets_another_folder_is_taken(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 130)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with runtime_folder(state_dir) as folder, socket.socket(socket.AF_UNIX) as listener:
        # As vLLM names them, in the folder of the thousandth engine.
        (folder / "1000").mkdir()
        listener.bind(str(folder / "1000" / str(uuid4())))
    assert not list(long.iterdir())


def test_without_any_folder_for_sockets_it_is_said_what_would_be_right(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(resources, "_OTHERS", ())
    with pytest.raises(UserError, match=r"TMPDIR: .* is no place for sockets"):
        runtime_folder(state_dir).__enter__()
