"""The resources that a node takes from the machine before anything heavy starts: ports, state
folder, lock.

Everything that can be refused is refused here, so that an error never leaves half a node. Also the
runtime folder: vLLM puts the sockets to its engine core into the folder for temporary files, and a
killed daemon cannot remove them, so each run of the daemon has its own folder, which the next run
removes. Not for files that must outlive the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import psutil

from hisparsed.control.api.socket import LONGEST_PATH_BYTES
from hisparsed.errors import UserError

_LOCK = "lock"
"""The file in the state folder that one daemon holds."""


def bind_tcp(host: str, port: int, *, key: str) -> socket.socket:
    """A bound socket for ``host:port``; ``key`` names the setting in the error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        # Listen now, not when uvicorn starts, so that a second daemon sees that the port is taken.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"{key}: {host}:{port} is taken by {_holder(port)}; stop it or set another port"
            ) from error
        raise UserError(f"{key}: {host}:{port} cannot be used: {error.strerror}") from error
    return listener


def _holder(port: int) -> str:
    """The process that listens on ``port``, as far as this user may know."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        connections = []
    pids = {
        one.pid
        for one in connections
        if one.status == psutil.CONN_LISTEN
        and one.laddr
        and one.laddr.port == port
        and one.pid is not None
    }
    for pid in sorted(pids):
        try:
            process = psutil.Process(pid)
            return f"process {pid} ({process.name()}, user {process.username()})"
        except psutil.Error:
            continue
    return f"a program of another user (`ss -ltnp 'sport = {port}'` as root names it)"


@contextlib.contextmanager
def state_dir_held(path: Path) -> Iterator[None]:
    """The state folder, created if missing and locked for one daemon.

    A start that is refused within this leaves no folder that it made, unless something was kept in
    it. Raises ``UserError`` when it cannot be written or another daemon has it.
    """
    made = [one for one in (path, *path.parents) if not one.exists()]
    make_state_dir(path)
    with state_lock(path):
        try:
            yield
        except UserError:
            _remove_empty(path, made)
            raise


def _remove_empty(state_dir: Path, made: Sequence[Path]) -> None:
    """``made``: the folders that this start created, the deepest first.

    Call with the lock held, so that no other daemon uses it.
    """
    if not made or any(one.name != _LOCK for one in state_dir.iterdir()):
        return
    with contextlib.suppress(OSError):
        (state_dir / _LOCK).unlink()
        for folder in made:
            folder.rmdir()


def make_state_dir(path: Path) -> None:
    """Create the state folder; raises ``UserError`` when it cannot be written."""
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"state_dir: {path} is not a folder; remove it or set another folder")
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write", str(path))
        _close_to_others(path)
    except OSError as error:
        raise UserError(
            f"state_dir: {path} cannot be used: {error.strerror}; create it for this user or "
            "set another folder"
        ) from error


def _close_to_others(folder: Path) -> None:
    """A folder that a daemon with another umask left must not be open to all users either."""
    for path in (folder, *(one for one in folder.iterdir() if not one.is_symlink())):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o007 and path.stat().st_uid == os.geteuid():
            path.chmod(mode & ~0o007)


@contextlib.contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """Lock the state folder for one daemon; released by the kernel when the process ends."""
    path = state_dir / _LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip()
            raise UserError(
                f"state_dir: {state_dir} belongs to a running daemon"
                f"{f' (pid {holder})' if holder else ''}; stop it or set another state_dir"
            ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


_PREFIX = "hisparsed-run-"
_BELOW_BYTES = len(f"/{_PREFIX}12345678/1000/{UUID(int=0)}")
"""The part after the temporary folder in the name of a vLLM socket."""
_OTHERS = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 (a folder of our own is made there)
_NOTE = "runtime-folder"
"""The file in the state folder that names the previous run's folder."""


def temporary_folder() -> Path:
    """Where the runtime folder goes: names of sockets below it must not get too long.

    Raises ``UserError`` where there is no such folder.
    """
    most = LONGEST_PATH_BYTES - _BELOW_BYTES
    try:
        first = tempfile.gettempdir()
    except FileNotFoundError:
        first = os.environ.get("TMPDIR", "")
    for name in (first, *_OTHERS):
        if name and len(os.fsencode(name)) <= most and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise UserError(
        f"TMPDIR: {first or 'no folder'} is no place for sockets: its name has more than {most} "
        f"bytes, or it cannot be written, and neither can {', '.join(_OTHERS)}; set a shorter one"
    )


@contextmanager
def runtime_folder(state_dir: Path) -> Iterator[Path]:
    """This process's temporary files go into its own folder, as long as this lasts.

    Call with the lock on ``state_dir`` held: what a killed daemon left is removed first.
    Raises ``UserError`` when the folder cannot be made.
    """
    note = state_dir / _NOTE
    left = noted_folder(state_dir)
    if left is not None:
        shutil.rmtree(left, ignore_errors=True)
    before = tempfile.tempdir
    place = temporary_folder()
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    except OSError as error:
        raise UserError(f"TMPDIR: {place} cannot be used: {error.strerror or error}") from error
    try:
        note.write_text(str(folder), encoding="utf-8")
        tempfile.tempdir = str(folder)
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            note.unlink(missing_ok=True)


def forget_folder(state_dir: Path) -> None:
    """Remove the note of the last daemon's folder, which is gone; call without the lock."""
    with suppress(OSError):
        (state_dir / _NOTE).unlink(missing_ok=True)


def noted_folder(state_dir: Path) -> Path | None:
    """The runtime folder that the last daemon on ``state_dir`` noted, if it is still there."""
    try:
        folder = Path((state_dir / _NOTE).read_text(encoding="utf-8"))
        # The note may be damaged; only a name in our own form is accepted.
        ours = folder.is_absolute() and folder.name.startswith(_PREFIX) and not folder.is_symlink()
        return folder if ours and folder.is_dir() else None
    except (OSError, ValueError):
        return None
