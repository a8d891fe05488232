"""Writes the small files of the state folder, so that a crash leaves the old or the new one.

One mode for all of them: the group of the operators may read. The journal is not one of them.
"""

from __future__ import annotations

import os
from pathlib import Path

STATE_FILE_MODE = 0o640


def write_state_file(path: Path, data: bytes) -> None:
    """Replace ``path`` whole. Raises ``OSError``; ``path`` is as it was then."""
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, STATE_FILE_MODE)
    with open(descriptor, "wb") as file:  # noqa: PTH123 (a path cannot carry the mode)
        os.fchmod(descriptor, STATE_FILE_MODE)  # the umask may have taken a bit away
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)
