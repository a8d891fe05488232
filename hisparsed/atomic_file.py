"""Replaces a small file atomically: a reader sees the old content or the new content, never a part.

For files with one writer at a time. Not for files that grow line by line, such as the journal.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace ``path``, or make it, with ``data``; its folder must be there.

    ``mode`` holds whatever the umask; ``durable`` waits for the disk, so that a crash of the
    machine leaves no empty file either. Raises ``OSError`` that names ``path``, which is as it was
    then, and leaves nothing next to it.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        # Not through a link: the writer may be root, the folder another user.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, mode), "wb") as file:  # noqa: PTH123 (no mode in a path)
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        new.replace(path)
    except BaseException as error:
        # What was begun takes room that a full disk has not.
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
