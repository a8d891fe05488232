"""Whether anybody still has a file open or mapped, as the kernel itself says.

A write lease is given only on a file that nobody else holds, so that a process in another
container or of another user is seen too. Works in any thread.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_held(path: Path) -> bool | None:
    """``None`` where the kernel does not say. Raises ``FileNotFoundError``."""
    try:
        with _opened(path) as number, _only_holder(number) as alone:
            return None if alone is None else not alone
    except FileNotFoundError:
        raise
    except OSError:
        return None


def remove_unheld(path: Path) -> bool:
    """Remove a file that nobody holds; says whether it is gone."""
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
    """Inside, nobody else gets at the file, if true. ``None``: the kernel gives no leases here."""
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
