"""The client of the control API: every way in which a daemon does not answer is an error."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient
from hisparsed.errors import UserError


def test_the_usual_socket_is_the_configured_one() -> None:
    from hisparsed.config.node import NodeConfig

    assert NodeConfig.model_fields["control_socket"].default == DEFAULT_SOCKET


def test_no_daemon_is_said_plainly(tmp_path: Path) -> None:
    with (
        ControlClient(tmp_path / "none.sock") as client,
        pytest.raises(UserError, match=r"no daemon answers on .*hisparsed serve"),
    ):
        client.status()


def test_a_dead_socket_is_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ControlClient(path) as client, pytest.raises(UserError, match="no daemon answers"):
        client.status()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied"), "join its group"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_a_socket_that_may_not_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def refuse(probe: Any, address: Any) -> None:
        raise error

    # Root, who runs these tests in containers, may use every socket.
    monkeypatch.setattr("hisparsed.control.api.client.socket.socket.connect", refuse)
    with (
        ControlClient(tmp_path / "control.sock") as client,
        pytest.raises(UserError, match=said),
    ):
        client.status()


def test_a_daemon_that_breaks_off_is_told(tmp_path: Path) -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("Server disconnected")

    transport = httpx.MockTransport(break_off)
    with (
        ControlClient(tmp_path / "control.sock", transport=transport) as client,
        pytest.raises(UserError, match="broke off: Server disconnected"),
    ):
        client.status()


def test_a_silent_daemon_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with (
            ControlClient(path, timeout_s=0.05) as client,
            pytest.raises(UserError, match=r"did not answer within 0\.05s"),
        ):
            client.status()


def test_an_answer_of_something_else_is_an_error(tmp_path: Path) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(502, text="<html>"))
    with (
        ControlClient(tmp_path / "control.sock", transport=transport) as client,
        pytest.raises(UserError, match="answered 502"),
    ):
        client.status()
