"""The control socket: modes, second daemons, stale files, and who may change the node."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparsed.control.api import socket as control_socket
from hisparsed.control.api.client import ControlClient
from hisparsed.control.api.socket import ControlServer, Peer, may_change, peer_of, recorded_actor
from hisparsed.control.status.document import Lifecycle
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
    node.lifecycle = Lifecycle.STARTING
    status = await ask(path, lambda client: client.status())
    assert status.lifecycle is Lifecycle.STARTING
    node.lifecycle = Lifecycle.SERVING
    await node.loop.start()
    await node.ticks(2)
    decisions = await ask(path, lambda client: client.decisions(limit=8))
    assert [one.tick for one in decisions] == [2] * 4 + [1] * 4
    await ask(path, lambda client: client.post("/v1/freeze", {"actor": "ann"}))
    assert len(node.holds.frozen) == 4
    with pytest.raises(UserError, match="levers"):
        await ask(path, lambda c: c.post("/v1/freeze", {"actor": "ann", "levers": ["brakes"]}))
    await node.close()
    assert not path.exists()
    # Two ticks, two events, and the policy in force.
    assert node.journal.health.written == 5


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


async def test_the_daemons_signals_stay_its_own(tmp_path: Path) -> None:
    import signal

    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    server = ControlServer(answer, tmp_path / "control.sock", end_streams=nothing)
    await server.start()
    assert signal.getsignal(signal.SIGTERM) is before
    await server.stop()


ME = getpass.getuser()
DAEMON, GROUP = 990, 991


def ask_as_a_client(path: Path, how: Any) -> Any:
    def call() -> Any:
        with ControlClient(path) as client:
            return how(client)

    return asyncio.to_thread(call)


def test_the_kernel_names_user_and_groups() -> None:
    here, there = socket.socketpair()
    with here, there:
        found = peer_of(here)
    assert found.uid == os.geteuid()
    assert found.groups == {os.getegid(), *os.getgroups()}
    assert found.name == ME


def test_a_user_without_a_name_has_a_number() -> None:
    assert Peer(2**31 - 7, frozenset()).name == f"uid {2**31 - 7}"


@pytest.mark.parametrize(
    ("uid", "groups", "allowed"),
    [
        (0, set(), True),
        (DAEMON, set(), True),
        (1000, {1000, GROUP}, True),
        (1000, {1000}, False),
        (1000, {0}, False),
    ],
)
def test_root_the_daemon_and_the_group_may_change(
    uid: int, groups: set[int], allowed: bool
) -> None:
    peer = Peer(uid, frozenset(groups))
    assert may_change(peer, owner_uid=DAEMON, group_gid=GROUP) is allowed


@pytest.mark.parametrize(
    ("client", "recorded"),
    [
        (("unix-user:ann", 1), "ann"),
        (("unix-user:root", 1), "ann (as root)"),
        (("127.0.0.1", 4711), "ann"),
        (None, "ann"),
    ],
)
def test_the_journal_has_the_user_behind_the_claim(client: Any, recorded: str) -> None:
    assert recorded_actor({"client": client}, "ann") == recorded


async def test_a_change_over_the_socket_is_recorded_with_its_user(node: Any) -> None:
    await node.open()
    path = node.folder / "control.sock"
    await ask_as_a_client(path, lambda client: client.post("/v1/freeze", {"actor": "ann"}))
    await ask_as_a_client(path, lambda client: client.post("/v1/thaw", {"actor": ME}))
    events = await ask_as_a_client(path, lambda client: client.journal_events(2))
    assert [one.actor for one in events] == [ME, f"ann (as {ME})"]
    await node.close()


async def test_somebody_outside_the_group_may_look_but_not_change(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "peer_of", lambda connection: Peer(2**31 - 7, frozenset()))
    await node.open()
    path = node.folder / "control.sock"
    await ask_as_a_client(path, lambda client: client.status())
    with pytest.raises(UserError, match="may look but not change anything; join the group"):
        await ask_as_a_client(path, lambda client: client.post("/v1/freeze", {"actor": "root"}))
    assert not node.holds.frozen
    await node.close()
