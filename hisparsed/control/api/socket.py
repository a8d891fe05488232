"""The control socket: one daemon per path, mode 0660, and who is at the other end.

Binds and removes the file itself, so that a second daemon never takes over a live socket, and makes
it again if it was removed. The kernel names the peer: only root, the daemon's user and the socket's
group may change anything, and the journal records the user behind a claimed name. ``app`` has what
is served.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import logging
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hisparsed.control.api.errors import error_body
from hisparsed.control.api.http_server import (
    BoundedProtocol,
    Connections,
    HttpLimits,
    QuietServer,
    bounded_protocol,
)
from hisparsed.errors import UserError
from hisparsed.policy.events import EventKind

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
    """The process that connected; raises ``OSError`` for a socket that is not a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _pid, uid, gid = struct.unpack("3i", credentials)
    groups = array.array("I")
    try:
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS))
    except OSError:
        groups = array.array("I")  # a kernel before 4.13: only the first group is known
    return Peer(uid, frozenset((gid, *groups)))


def may_change(peer: Peer, *, owner_uid: int, group_gid: int) -> bool:
    """Whether ``peer`` may change the node whose socket ``owner_uid`` and ``group_gid`` own."""
    return peer.uid in (0, owner_uid) or group_gid in peer.groups


class PeerProtocol(BoundedProtocol):
    """Names the client; uvicorn leaves that empty on a Unix socket."""

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
    """Refuses changes by clients that may only read; requests that arrived in another way pass."""

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
    """The user that the kernel names; ``None`` for a request that arrived in another way."""
    client = scope.get("client")
    if client is None or not client[0].startswith(_SCHEME):
        return None
    return str(client[0].removeprefix(_SCHEME))


def recorded_actor(scope: Any, claimed: str) -> str:
    """The actor for the journal: the claimed name, and the user behind it if the name differs."""
    user = peer_user(scope)
    return claimed if user in (None, claimed) else f"{claimed} (as {user})"


MODE = 0o660
LONGEST_PATH_BYTES = 107
_PROBE_S = 1.0
_STOP_S = 5
_LOOK_EVERY_S = 1.0

LIMITS = HttpLimits(connections=256, body_s=10.0)
"""Operators are few, and their longest body is a policy document."""

log = logging.getLogger("hisparsed.control")

SocketReport = Callable[[EventKind, str], None]


def _log(_: EventKind, sentence: str) -> None:
    log.warning("The control socket: %s", sentence)


def path_problem(path: Path) -> str | None:
    """Why no socket can be at ``path``, judged by its name."""
    if len(os.fsencode(path)) <= LONGEST_PATH_BYTES:
        return None
    return (
        f"control_socket: {path} is longer than the {LONGEST_PATH_BYTES} bytes that a Unix socket "
        "may have; choose a shorter path"
    )


class ControlServer:
    """``start`` binds and serves, ``stop`` ends the streams and removes the socket.

    ``end_streams`` is called before stopping, since open event streams would hold it up.
    ``report`` is called when the socket's file is gone and when it was created again.
    """

    def __init__(
        self,
        application: Any,
        path: Path,
        *,
        end_streams: Callable[[], None],
        report: SocketReport = _log,
        limits: HttpLimits = LIMITS,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._application = application
        self._path = path
        self._end_streams = end_streams
        self._report = report
        self._look_every_s = look_every_s
        self.connections = Connections(limits)
        self._looking: asyncio.Task[None] | None = None
        self._lost = False
        self._lock_file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._server: QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once requests are answered.

        Raises ``UserError`` when another daemon has the socket, or the path cannot be used.
        """
        server, serving = await self._serve(self._bind())
        if serving.done():
            self._release()
            await serving
        self._looking = asyncio.create_task(self._look(server, serving))

    async def _serve(self, listener: socket.socket) -> tuple[QuietServer, asyncio.Task[None]]:
        """Returns once requests are answered, or the task has ended."""
        self._server = server = QuietServer(
            PeerGuard(self._application),
            bounded_protocol(self.connections, error_body, PeerProtocol),
            graceful_s=_STOP_S,
        )
        self._serving = serving = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return server, serving

    async def stop(self) -> None:
        """Answer open requests, then remove the socket if it is still this one."""
        if self._looking is not None:
            self._looking.cancel()
        self._end_streams()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        self._release()

    async def _look(self, server: QuietServer, serving: asyncio.Task[None]) -> None:
        """Create the socket again when its file is gone, and serve again if the server ends.

        Open connections are left alone.
        """
        while True:
            await asyncio.sleep(self._look_every_s)
            ended = serving.done()
            if not ended and self._is_there():
                continue
            why = "was removed"
            if ended:
                why = f"is no longer served ({_end_of(serving)})"
                for listener in server.servers:
                    listener.close()
            try:
                if ended:
                    server, serving = await self._serve(self._bind())
                else:
                    await server.listen_on(self._bind())
            except Exception as error:
                self._identity = None  # or a socket without a listener would be taken for it
                if not self._lost:
                    self._lost = True
                    sentence = f"The control socket {why}, and cannot be created again: {error}"
                    self._report(EventKind.CONTROL_SOCKET_LOST, sentence)
                continue
            self._lost = False
            sentence = f"The control socket {self._path} {why}; it was created again."
            self._report(EventKind.CONTROL_SOCKET_BACK, sentence)

    def _is_there(self) -> bool:
        try:
            found = self._path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _bind(self) -> socket.socket:
        path = self._path
        problem = path_problem(path)
        if problem is not None:
            raise UserError(problem)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock()
            _remove_stale(path)
            listener.bind(str(path))
            # No client can connect before listen(), so the mode is right from the first connection.
            path.chmod(MODE)
            listener.listen(64)
            listener.setblocking(False)
            found = path.stat()
            self._identity = (found.st_dev, found.st_ino)
        except OSError as error:
            listener.close()
            self._unless_serving()
            raise UserError(
                f"control_socket: {path} cannot be created: {error.strerror or error}; use a "
                f"folder "
                "that this user may write"
            ) from error
        except UserError:
            listener.close()
            self._unless_serving()
            raise
        return listener

    def _unless_serving(self) -> None:
        """A start that failed leaves nothing; a server that has lost its file continues."""
        if self._server is None:
            self._release()

    def _lock(self) -> None:
        lock_path = self._path.with_name(self._path.name + ".lock")
        lock_file = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        if self._lock_file is not None:
            if os.path.sameopenfile(lock_file, self._lock_file):
                os.close(lock_file)
                return
            os.close(self._lock_file)  # its file was removed too
        self._lock_file = lock_file
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(self._path) from None

    def _release(self) -> None:
        if self._identity is not None:
            try:
                found = self._path.lstat()
                if (found.st_dev, found.st_ino) == self._identity:
                    self._path.unlink()
            except FileNotFoundError:
                pass
            self._identity = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _end_of(serving: asyncio.Task[None]) -> str:
    error = None if serving.cancelled() else serving.exception()
    return "it ended unexpectedly" if error is None else f"{type(error).__name__}: {error}"


def is_live(path: Path) -> bool:
    """Whether a process listens on the socket at ``path``.

    A socket that does not answer, or may not be asked, counts as in use.
    """
    if not path.exists():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _remove_stale(path: Path) -> None:
    """Remove a socket without a listener. Raises ``UserError`` for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UserError(
            f"control_socket: {path} is there and is not a socket; remove it or choose another path"
        )
    if is_live(path):
        raise _taken(path)
    path.unlink(missing_ok=True)


def _taken(path: Path) -> UserError:
    return UserError(
        f"control_socket: another hisparsed serves on {path}; stop it, or give this one its own "
        "control_socket and state_dir"
    )
