"""Shared memory of an engine's processes: a record of it on disk, and its removal.

A file in /dev/shm outlives its owners if all of them are killed at the same time, and vLLM gives
most of its files random names. So `shared-memory.json` in the state folder names the files that the
processes of an engine have mapped, and the next start and the doctor remove what is left of them.

Two rules protect the files of others. Only files directly in /dev/shm that were not there before
the engine began are an engine's: weights that are kept there are mapped too. And a file that is
still in use is never removed: the kernel gives a write lease only on a file that no other process
holds, in any container and of any user.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hisparsed.control.state_files import write_state_file

log = logging.getLogger("hisparsed.daemon")

FILE_NAME = "shared-memory.json"
_SHM = Path("/dev/shm")  # noqa: S108 (where the kernel keeps shared memory)
_DELETED = " (deleted)"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file in /dev/shm. Device and inode distinguish it from a later one of the same name."""

    path: str
    device: int
    inode: int

    def is_there(self) -> bool:
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


def files_there() -> frozenset[SharedFile]:
    """All files of /dev/shm, without its folders' content; empty where there is no /dev/shm."""
    try:
        device = _SHM.stat().st_dev
        with os.scandir(_SHM) as entries:
            return frozenset(SharedFile(one.path, device, one.inode()) for one in entries)
    except OSError:
        return frozenset()


def mapped_by(pid: int) -> frozenset[SharedFile]:
    """The files directly in /dev/shm that a process has mapped; none if it cannot be read."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(_shared_files(maps))


def _shared_files(maps: str) -> Iterator[SharedFile]:
    for line in maps.splitlines():
        _, _, _, device, inode, *path = line.split(maxsplit=5)
        if path and Path(path[0]).parent == _SHM and not path[0].endswith(_DELETED):
            major, minor = (int(number, 16) for number in device.split(":"))
            yield SharedFile(path[0], os.makedev(major, minor), int(inode))


def remove_left(files: Iterable[SharedFile]) -> list[str]:
    """Remove those that are still there and that no process holds; their names."""
    there = sorted(file.path for file in files if file.is_there())
    return [path for path in there if remove_unheld(Path(path))]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    boot: str
    """Of the kernel. Shared memory does not survive a restart of the machine."""
    files: tuple[SharedFile, ...]


class SharedMemoryRecord:
    """``shared-memory.json`` in ``folder``. Only the daemon that holds the folder's lock writes.

    A record that cannot be read or written is logged and stops nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._boot = _BOOT.read_text().strip()
        self._files = self._load()

    def left(self) -> frozenset[SharedFile]:
        """The recorded files that are still there, whether a process holds them or not."""
        return frozenset(file for file in self._files if file.is_there())

    def add(self, files: frozenset[SharedFile]) -> None:
        """Record these too. Writes only what is new, and drops what is gone."""
        if not files <= self._files:
            self._save(self.left() | files)

    def remove(self) -> list[str]:
        """Remove the recorded files that no process holds; their names."""
        return remove_left(self._files)

    def _load(self) -> frozenset[SharedFile]:
        try:
            document = _Document.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValidationError) as error:
            log.warning("%s cannot be read (%s); memory that it names stays.", self.path, error)
            return frozenset()
        # A damaged record must not name files elsewhere.
        ours = (file for file in document.files if Path(file.path).parent == _SHM)
        return frozenset(ours) if document.boot == self._boot else frozenset()

    def _save(self, files: frozenset[SharedFile]) -> None:
        self._files = files
        ordered = tuple(sorted(files, key=lambda file: file.path))
        document = _Document(boot=self._boot, files=ordered)
        try:
            write_state_file(self.path, document.model_dump_json(indent=1).encode())
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; shared memory stays if the node is killed.",
                self.path,
                error.strerror or error,
            )


def is_held(path: Path) -> bool | None:
    """``None`` where the kernel gives no answer. Raises ``FileNotFoundError``."""
    try:
        with _opened(path) as number, _only_holder(number) as alone:
            return None if alone is None else not alone
    except FileNotFoundError:
        raise
    except OSError:
        return None


def remove_unheld(path: Path) -> bool:
    """Remove a file that no process holds; returns whether it is gone."""
    try:
        with _opened(path) as number, _only_holder(number) as alone:
            if alone:
                path.unlink()
            return bool(alone)
    except FileNotFoundError:
        return True
    except OSError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def _only_holder(number: int) -> Iterator[bool | None]:
    """If true, no other process can open the file inside. ``None``: the kernel gives no leases
    here.
    """
    try:
        # Whoever opens the file meanwhile makes the kernel send a signal. SIGIO, which is usual,
        # would end this process; this one is ignored by default.
        fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        yield False
        return
    except OSError:
        yield None
        return
    yield True
    fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
