"""Files that are written whole: old or new content, the mode that was asked for, no leftovers."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hisparsed.atomic_file import write_atomically


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first, longer")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_who_has_the_old_file_open_reads_it_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old content")
    with path.open("rb") as reader:
        beginning = reader.read(4)
        write_atomically(path, b"new")
        assert beginning + reader.read() == b"old content"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_mode_holds_whatever_the_umask_and_the_file_before(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    path.chmod(0o666)
    before = os.umask(0o077)
    try:
        write_atomically(path, b"x", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_a_crash_left_behind_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_bytes(b"half of something that was longer")
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert not (tmp_path / "file.new").exists()


@pytest.mark.parametrize("call", ["fchmod", "fsync"])
def test_a_failure_names_the_file_and_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomically(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_durable_write_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse)
    write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_link_where_the_new_file_begins_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"somebody else's")
    (tmp_path / "file.new").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "file", b"x")
    assert other.read_bytes() == b"somebody else's"
