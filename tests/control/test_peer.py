"""Who steers: the kernel's word against the caller's, and changes only for those who may."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hisparsed.control import peer as peer_module
from hisparsed.control.client import ControlClient
from hisparsed.control.peer import Peer, may_change, peer_of, recorded_actor
from hisparsed.errors import UserError

ME = getpass.getuser()
DAEMON, GROUP = 990, 991


def ask(path: Path, how: Any) -> Any:
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
    await ask(path, lambda client: client.post("/v1/freeze", {"actor": "ann"}))
    await ask(path, lambda client: client.post("/v1/thaw", {"actor": ME}))
    events = await ask(path, lambda client: client.journal_events(2))
    assert [one.actor for one in events] == [ME, f"ann (as {ME})"]
    await node.close()


async def test_somebody_outside_the_group_may_look_but_not_change(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "peer_of", lambda connection: Peer(2**31 - 7, frozenset()))
    await node.open()
    path = node.folder / "control.sock"
    await ask(path, lambda client: client.status())
    with pytest.raises(UserError, match="may look but not change anything; join the group"):
        await ask(path, lambda client: client.post("/v1/freeze", {"actor": "root"}))
    assert not node.overrides.frozen
    await node.close()
