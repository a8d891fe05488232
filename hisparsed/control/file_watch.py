"""Looks at configuration files whenever something in their folders changes.

Editors replace files, and Kubernetes swaps a symbolic link beside them, so folders are watched and
contents compared. A slow look goes on without any change, for file systems that tell of none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import watchfiles

from hisparsed.policy.document import read_document

log = logging.getLogger("hisparsed.control")

DEBOUNCE_MS = 300
SLOW_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """``look`` compares the file with what is known of it; called often, so it must be cheap."""

    path: Path
    look: Callable[[], None]


def fingerprint(path: Path) -> str:
    """SHA-256 of the content in hexadecimal, or why there is none to read.

    Of a file that is too large for a document, only the beginning counts.
    """
    try:
        return hashlib.sha256(read_document(path)).hexdigest()
    except OSError as error:
        return type(error).__name__


def unexpected(error: Exception) -> str:
    """What a rejection says of a document that the daemon itself fails on."""
    return (
        f"it cannot be judged ({type(error).__name__}: {error}). This is a mistake in the daemon: "
        "please report it with the document."
    )


def folders_of(files: Sequence[Watched]) -> dict[Path, tuple[int, int]]:
    """Where each file's name stands, and where the file itself is when the name is a link.

    Each with what tells a folder from another of its name. Those that cannot be seen are left out.
    """
    names = {file.path.absolute().parent for file in files}
    # Not ``Path.resolve``, which raises for links that lead in a circle.
    places = {Path(os.path.realpath(file.path)).parent for file in files}
    found = {}
    for folder in names | places:
        with contextlib.suppress(OSError):
            seen = folder.stat()
            if stat.S_ISDIR(seen.st_mode):
                found[folder] = (seen.st_dev, seen.st_ino)
    return found


def _changes(*folders: Path) -> AsyncIterator[Any]:
    return watchfiles.awatch(
        *folders,
        watch_filter=None,
        debounce=DEBOUNCE_MS,
        rust_timeout=round(SLOW_LOOK_S * 1000),
        yield_on_timeout=True,
        recursive=False,
    )


async def watch_files(
    files: Sequence[Watched],
    *,
    changes: Callable[..., AsyncIterator[Any]] = _changes,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Look at all files now and at every change, until cancelled."""
    said = False
    while True:
        for file in files:
            file.look()
        folders = folders_of(files)
        try:
            async for _ in changes(*sorted(folders)):
                for file in files:
                    file.look()
                if folders_of(files) != folders:
                    break  # a link leads elsewhere now, or a folder was made anew
            else:
                await sleep(SLOW_LOOK_S)
        except OSError as error:
            if not said:
                said = True
                log.warning(
                    "Changes of %s cannot be watched (%s); they are looked at every %gs.",
                    ", ".join(str(file.path) for file in files),
                    error,
                    SLOW_LOOK_S,
                )
            await sleep(SLOW_LOOK_S)
