"""Ports, state folder and lock: each refusal names the setting, the value and the way out."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hisparsed.errors import UserError
from hisparsed.node.resources import bind_tcp, make_state_dir, state_dir_held, state_lock


def test_a_taken_port_is_refused_by_name() -> None:
    first = bind_tcp("127.0.0.1", 0, key="api.port")
    port = first.getsockname()[1]
    says = rf"api\.port: 127\.0\.0\.1:{port} is taken by process {os.getpid()} \(.*, user .*\)"
    with pytest.raises(UserError, match=says):
        bind_tcp("127.0.0.1", port, key="api.port")
    first.close()


def test_a_port_whose_holder_may_not_be_known_says_how_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = bind_tcp("127.0.0.1", 0, key="api.port")
    port = first.getsockname()[1]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    with pytest.raises(UserError, match=f"a program of another user .*sport = {port}"):
        bind_tcp("127.0.0.1", port, key="api.port")
    first.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"api\.port: 192\.0\.2\.1:8000 cannot be used"):
        bind_tcp("192.0.2.1", 8000, key="api.port")


def test_a_state_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"state_dir: .*file/state cannot be used"):
        make_state_dir(tmp_path / "file" / "state")
    with pytest.raises(UserError, match=r"state_dir: .*file is not a folder; remove it"):
        make_state_dir(tmp_path / "file")


def test_what_everybody_could_read_in_the_state_folder_is_closed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    make_state_dir(state)
    state.chmod(0o755)
    (state / "journal.sqlite").write_bytes(b"")
    (state / "journal.sqlite").chmod(0o644)
    make_state_dir(state)
    assert [f"{one.stat().st_mode & 0o777:o}" for one in (state, state / "journal.sqlite")] == [
        "750",
        "640",
    ]


def test_two_daemons_cannot_share_a_state_folder(tmp_path: Path) -> None:
    with (
        state_lock(tmp_path),
        pytest.raises(UserError, match=r"belongs to a running daemon \(pid \d+\)"),
        state_lock(tmp_path),
    ):
        pass
    with state_lock(tmp_path):
        pass


def start(state: Path, keep: str | None) -> None:
    with state_dir_held(state):
        assert (state / "lock").exists()
        if keep is not None:
            (state / keep).write_text("kept", "utf-8")
        raise UserError("the port is taken")


def refused_start(state: Path, keep: str | None = None) -> None:
    with pytest.raises(UserError, match="the port is taken"):
        start(state, keep)


def test_a_start_that_is_refused_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    refused_start(tmp_path / "var" / "lib" / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_refused_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    refused_start(state)
    assert [one.name for one in state.iterdir()] == ["lock"], "its lock may be another's next"


def test_a_start_that_is_refused_leaves_what_was_kept_meanwhile(tmp_path: Path) -> None:
    state = tmp_path / "state"
    refused_start(state, keep="journal.sqlite")
    assert (state / "journal.sqlite").read_text("utf-8") == "kept"
    assert (state / "lock").exists()


def test_a_node_that_ends_leaves_its_state_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with state_dir_held(state):
        pass
    assert (state / "lock").exists()
    with pytest.raises(RuntimeError), state_dir_held(tmp_path / "other"):
        raise RuntimeError("a bug in the daemon")
    assert (tmp_path / "other" / "lock").exists()


def test_a_second_daemon_takes_nothing_of_the_first(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with state_dir_held(state):
        with pytest.raises(UserError, match="belongs to a running daemon"), state_dir_held(state):
            pass
        assert (state / "lock").read_text("utf-8").strip() == str(os.getpid())
