"""Who is at the other end of the control socket, as the kernel says: not as the caller says.

Only root, the daemon's own user and members of the socket's group may change anything, even where
somebody has opened the socket's mode; and what they call themselves is recorded with their user.
"""

from __future__ import annotations

import array
import json
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hisparsed.control.bounded_http import BoundedProtocol

_SCHEME: Final = "unix-user:"
_SO_PEERGROUPS: Final = 59
"""Not in Python's socket module; of asm-generic/socket.h."""
_MOST_GROUPS: Final = 65536
_READS: Final = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Peer:
    uid: int
    groups: frozenset[int]

    @property
    def name(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return f"uid {self.uid}"


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected; raises ``OSError`` for a socket that is no Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _pid, uid, gid = struct.unpack("3i", credentials)
    groups = array.array("I")
    try:
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS))
    except OSError:
        groups = array.array("I")  # a kernel before 4.13: the first group must do
    return Peer(uid, frozenset((gid, *groups)))


def may_change(peer: Peer, *, owner_uid: int, group_gid: int) -> bool:
    """Whether ``peer`` may change the node whose socket ``owner_uid`` and ``group_gid`` own."""
    return peer.uid in (0, owner_uid) or group_gid in peer.groups


class PeerProtocol(BoundedProtocol):
    """Says who the client is; uvicorn leaves that empty on a Unix socket."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        peer = peer_of(connection)
        owner_uid, group_gid = _owners(Path(connection.getsockname()))
        allowed = may_change(peer, owner_uid=owner_uid, group_gid=group_gid)
        self.client = (f"{_SCHEME}{peer.name}", int(allowed))


def _owners(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return os.geteuid(), os.getegid()  # removed since the caller connected
    return found.st_uid, found.st_gid


class PeerGuard:
    """Refuses changes of those who may only look; what came in another way passes."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        user = peer_user(scope)
        if user is None or scope["method"] in _READS or scope["client"][1]:
            await self._application(scope, receive, send)
            return
        message = (
            f"{user} may look but not change anything; join the group of the control socket "
            "(usually hisparsed), or use sudo"
        )
        body = json.dumps({"error": {"code": "not_allowed", "message": message}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def peer_user(scope: Any) -> str | None:
    """The user that the kernel names; ``None`` for a request that came in another way."""
    client = scope.get("client")
    if client is None or not client[0].startswith(_SCHEME):
        return None
    return str(client[0].removeprefix(_SCHEME))


def recorded_actor(scope: Any, claimed: str) -> str:
    """What the journal says: the claim, and the user behind it where that is another name."""
    user = peer_user(scope)
    return claimed if user in (None, claimed) else f"{claimed} (as {user})"
