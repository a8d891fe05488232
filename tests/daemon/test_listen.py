"""Ports, state folder and lock: each refusal names the setting, the value and the way out."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hisparsed.daemon.listen import bind_tcp, make_state_dir, state_lock
from hisparsed.errors import UserError


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
