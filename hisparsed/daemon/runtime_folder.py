"""One folder for the sockets of one life of the daemon, removed at its end or by the next life.

vLLM puts the sockets to its engine core into the folder for temporary files, and a daemon that
was killed cannot remove them. Not for what must outlive the daemon.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "hisparsed-run-"
_NOTE = "runtime-folder"
"""The file in the state folder that names the folder of the life before."""


@contextmanager
def runtime_folder(state_dir: Path) -> Iterator[Path]:
    """This process's temporary files go into a folder of its own, as long as this lasts.

    Call with the lock on ``state_dir`` held: what a killed daemon left is removed first.
    Raises ``OSError`` when the folder cannot be made.
    """
    note = state_dir / _NOTE
    left = noted_folder(state_dir)
    if left is not None:
        shutil.rmtree(left, ignore_errors=True)
    before = tempfile.tempdir
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        note.write_text(str(folder), encoding="utf-8")
        tempfile.tempdir = str(folder)
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            note.unlink(missing_ok=True)


def noted_folder(state_dir: Path) -> Path | None:
    """The runtime folder that the last daemon on ``state_dir`` noted, if it is still there."""
    try:
        folder = Path((state_dir / _NOTE).read_text(encoding="utf-8"))
        # The note may be damaged; only what looks like one of ours is one.
        ours = folder.is_absolute() and folder.name.startswith(_PREFIX) and not folder.is_symlink()
        return folder if ours and folder.is_dir() else None
    except (OSError, ValueError):
        return None
