"""The control socket and its client, for real: modes, second daemons, stale files, errors."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
from hisparsed.control.socket import ControlServer
from hisparsed.control.status import Lifecycle
from hisparsed.errors import UserError


def nothing() -> None:
    """No streams to end."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def ask(path: Path, how: Callable[[ControlClient], Any]) -> Any:
    def call() -> Any:
        with ControlClient(path) as client:
            return how(client)

    return await asyncio.to_thread(call)


async def test_a_node_on_its_socket(node: Any) -> None:
    path = node.folder / "control.sock"
    await node.open()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    status = await ask(path, lambda client: client.status())
    assert status.lifecycle is Lifecycle.STARTING
    await node.loop.start()
    await node.ticks(2)
    decisions = await ask(path, lambda client: client.decisions(limit=8))
    assert [one.tick for one in decisions] == [2] * 4 + [1] * 4
    await ask(path, lambda client: client.post("/v1/freeze", {"actor": "ann"}))
    assert len(node.overrides.frozen) == 4
    with pytest.raises(UserError, match="levers"):
        await ask(path, lambda c: c.post("/v1/freeze", {"actor": "ann", "levers": ["brakes"]}))
    await node.close()
    assert not path.exists()
    assert node.journal.health.written == 4


async def test_stopping_ends_open_streams(node: Any) -> None:
    await node.open()
    transport = httpx.AsyncHTTPTransport(uds=str(node.folder / "control.sock"))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://node") as client,
        client.stream("GET", "/v1/events") as stream,
    ):
        lines = stream.aiter_lines()
        assert await anext(lines) == "event: status"
        await node.close()
        rest = [line async for line in lines]
    assert not [line for line in rest if line.startswith("event")]


async def test_a_second_daemon_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = ControlServer(answer, path, end_streams=nothing)
    second = ControlServer(answer, path, end_streams=nothing)
    await first.start()
    with pytest.raises(UserError, match=r"another hisparsed serves on .*control\.sock"):
        await second.start()
    await second.stop()
    assert await ask(path, lambda client: client.get("/")) == {}
    await first.stop()
    assert not path.exists()


async def test_a_live_socket_without_a_lock_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(UserError, match="another hisparsed"):
            await ControlServer(answer, path, end_streams=nothing).start()
        assert path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = ControlServer(answer, path, end_streams=nothing)
    await server.start()
    assert await ask(path, lambda client: client.get("/")) == {}
    await server.stop()


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(UserError, match="is not a socket"):
        await ControlServer(answer, path, end_streams=nothing).start()
    assert path.read_text() == "precious"


async def test_a_socket_that_replaced_ours_stays(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    server = ControlServer(answer, path, end_streams=nothing)
    await server.start()
    path.unlink()
    path.write_text("someone else's")
    await server.stop()
    assert path.exists()


@pytest.mark.parametrize("place", ["x" * 120, "file/control.sock"])
async def test_impossible_places_are_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / place
    with pytest.raises(UserError, match="control_socket: ") as caught:
        await ControlServer(answer, path, end_streams=nothing).start()
    assert str(path) in str(caught.value)


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
    monkeypatch.setattr("hisparsed.control.client.socket.socket.connect", refuse)
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


async def test_the_daemons_signals_stay_its_own(tmp_path: Path) -> None:
    import signal

    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    server = ControlServer(answer, tmp_path / "control.sock", end_streams=nothing)
    await server.start()
    assert signal.getsignal(signal.SIGTERM) is before
    await server.stop()
