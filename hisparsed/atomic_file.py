"""Replaces a small file atomically: a reader sees the old content or the new content, never a part.

For files with one writer at a time. Not for files that grow line by line, such as the journal.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace or create ``path`` with ``data``; its folder must exist.

    ``mode`` applies whatever the umask is; ``durable`` waits for the disk, so that a crash of the
    machine leaves no empty file either. Raises ``OSError`` that names ``path``; the file is then
    unchanged, and no temporary file stays.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        # Never follow a link: the writer may be root, and the folder another user's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, mode), "wb") as file:  # noqa: PTH123 (no mode in a path)
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        new.replace(path)
    except BaseException as error:
        # An unfinished file takes room on a full disk.
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
