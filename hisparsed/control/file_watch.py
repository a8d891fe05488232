"""Configuration files that change on disk: the watch, and the node's document.

Editors replace files and Kubernetes swaps a symbolic link, so folders are watched and contents
compared; on file systems that report no changes the files are read now and then. ``NodeFile``
compares the node's document with the running configuration: a change waits for a restart and is
shown as pending.
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

from hisparsed.config.node import NodeConfig
from hisparsed.control.events import EventRecorder
from hisparsed.policy.document import read_document
from hisparsed.policy.events import EventKind
from hisparsed.policy.keys import PendingRestart, leaves
from hisparsed.policy.problems import ConfigError

log = logging.getLogger("hisparsed.control")

DEBOUNCE_MS = 300
SLOW_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """``look`` compares the file with its last content; called often, so it must be cheap."""

    path: Path
    look: Callable[[], None]


def fingerprint(path: Path) -> str:
    """SHA-256 of the content in hexadecimal, or why there is none to read.

    For a file that is too large for a document, only of its beginning.
    """
    try:
        return hashlib.sha256(read_document(path)).hexdigest()
    except OSError as error:
        return type(error).__name__


def unexpected(error: Exception) -> str:
    """The text of a rejection when the daemon itself fails on the document."""
    return (
        f"it cannot be judged ({type(error).__name__}: {error}). This is a bug in the daemon: "
        f"please report it with the document."
    )


def folders_of(files: Sequence[Watched]) -> dict[Path, tuple[int, int]]:
    """The folder of each file's name, and the folder of the file itself when the name is a link.

    Each with the identity of the folder, which a new one of the same name does not have. Folders
    that cannot be read are omitted.
    """
    names = {file.path.absolute().parent for file in files}
    # Not ``Path.resolve``, which raises for links that form a cycle.
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
                    break  # a link has another target now, or a folder was recreated
            else:
                await sleep(SLOW_LOOK_S)
        except OSError as error:
            if not said:
                said = True
                log.warning(
                    "Changes of %s cannot be watched (%s); the file is read every %gs.",
                    ", ".join(str(file.path) for file in files),
                    error,
                    SLOW_LOOK_S,
                )
            await sleep(SLOW_LOOK_S)


class NodeFile:
    """``load`` reads the document as the start of a node does, raising ``ConfigError``."""

    def __init__(
        self,
        path: Path,
        running: NodeConfig,
        recorder: EventRecorder,
        *,
        load: Callable[[Path], NodeConfig],
    ) -> None:
        self._path = path
        self._running = running
        self._recorder = recorder
        self._load = load
        self._seen: str | None = None
        self.pending: tuple[PendingRestart, ...] = ()
        """Keys whose change takes effect only after a restart."""

    def now_runs(self, config: NodeConfig) -> None:
        """From now on the document is compared with this."""
        if config == self._running:
            return
        self._running = config
        with contextlib.suppress(ConfigError):  # reported when the change is seen
            self.pending = differences(config, self._load(self._path))

    def look(self) -> None:
        """Compare again if the file changed since the last look."""
        found = fingerprint(self._path)
        if found == self._seen:
            return
        self._seen = found
        try:
            pending = differences(self._running, self._load(self._path))
        except ConfigError as error:
            said = f"{self._path} has changed, and a restart would fail: {error}"
            self._recorder.event(EventKind.PENDING_RESTART, said)
            return
        except Exception as error:
            log.exception("%s cannot be checked.", self._path)
            said = f"{self._path} has changed, and a restart would fail: {unexpected(error)}"
            self._recorder.event(EventKind.PENDING_RESTART, said)
            return
        if pending != self.pending:
            keys = ", ".join(one.key for one in pending)
            said = f"A restart would change {keys}." if pending else "No restart is pending."
            self._recorder.event(EventKind.PENDING_RESTART, f"{self._path} has changed. {said}")
        self.pending = pending


def differences(running: NodeConfig, wanted: NodeConfig) -> tuple[PendingRestart, ...]:
    """Keys whose values differ, in the document's order."""
    return tuple(
        PendingRestart(key.name, key.text(running), key.text(wanted))
        for key in leaves(NodeConfig)
        if key.value(running) != key.value(wanted)
    )
