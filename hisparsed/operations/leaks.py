"""What dead engines and daemons leave behind: finding it, and removing only what nobody holds.

Whether a file in /dev/shm is still mapped is asked of the kernel itself (a write lease is given
only on a file that nobody else has open or mapped), so that an engine in another container or of
another user is seen too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OFFLOAD_FILES = "vllm_offload_*"
"""vLLM's shared host memory, named after the engine."""


@dataclass(frozen=True, slots=True)
class ShmFile:
    path: Path
    size_bytes: int
    """Memory that it takes, which is less than its length where it has holes."""
    held: bool | None
    """Whether some process has it open or mapped; ``None`` where the kernel does not say."""


def offload_files(folder: Path) -> list[ShmFile]:
    """vLLM's files in ``folder``, which is /dev/shm."""
    found = []
    for path in sorted(folder.glob(OFFLOAD_FILES)):
        try:
            size_bytes = path.lstat().st_blocks * 512
            found.append(ShmFile(path, size_bytes, _is_held(path)))
        except FileNotFoundError:
            continue  # its engine has just removed it
    return found


def sweep(file: ShmFile) -> bool:
    """Remove a file that nobody holds; says whether it is gone. Looks again right before."""
    try:
        with _opened(file.path) as number, _only_holder(number) as alone:
            if alone:
                file.path.unlink()
            return bool(alone)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _is_held(path: Path) -> bool | None:
    try:
        with _opened(path) as number, _only_holder(number) as alone:
            return None if alone is None else not alone
    except FileNotFoundError:
        raise
    except OSError:
        return None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def _only_holder(number: int) -> Iterator[bool | None]:
    """Inside, nobody else gets at the file, if true. ``None``: the kernel gives no leases here."""
    # Whoever opens the file meanwhile makes the kernel send SIGIO, which would end this process.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        try:
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            yield False
            return
        except OSError:
            yield None
            return
        yield True
        fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        signal.signal(signal.SIGIO, before)


def remove_folder(folder: Path) -> bool:
    """Remove a runtime folder of a dead daemon; says whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
