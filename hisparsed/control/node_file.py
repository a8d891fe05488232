"""Notices that the node's document (`hisparsed.yaml`) says something else than what runs.

Nothing of it changes while the node runs; what a restart would change is shown, and whether a
restart would fail.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from hisparsed.config.node import NodeConfig
from hisparsed.control.announce import Announcer
from hisparsed.control.file_watch import fingerprint, unexpected
from hisparsed.control.records import EventKind
from hisparsed.policy.document import ConfigError
from hisparsed.policy.keys import leaves
from hisparsed.policy.restart import PendingRestart

log = logging.getLogger("hisparsed.control")


class NodeFile:
    """``load`` reads the document as the start of a node does, raising ``ConfigError``.

    ``tell`` gets what only a restart puts in force.
    """

    def __init__(
        self,
        path: Path,
        running: NodeConfig,
        announcer: Announcer,
        *,
        load: Callable[[Path], NodeConfig],
        tell: Callable[[tuple[PendingRestart, ...]], None],
    ) -> None:
        self._path = path
        self._running = running
        self._announcer = announcer
        self._load = load
        self._tell = tell
        self._seen: str | None = None
        self._pending: tuple[PendingRestart, ...] = ()

    def now_runs(self, config: NodeConfig) -> None:
        """From now on the document is compared with this."""
        if config == self._running:
            return
        self._running = config
        with contextlib.suppress(ConfigError):  # told when the file was seen to have changed
            self._pending = differences(config, self._load(self._path))
            self._tell(self._pending)

    def look(self) -> None:
        """Compare again if the file is another one than at the last look."""
        found = fingerprint(self._path)
        if found == self._seen:
            return
        self._seen = found
        try:
            pending = differences(self._running, self._load(self._path))
        except ConfigError as error:
            said = f"{self._path} has changed, and a restart would fail: {error}"
            self._announcer.event(EventKind.PENDING_RESTART, said)
            return
        except Exception as error:
            log.exception("%s cannot be judged.", self._path)
            said = f"{self._path} has changed, and a restart would fail: {unexpected(error)}"
            self._announcer.event(EventKind.PENDING_RESTART, said)
            return
        if pending != self._pending:
            keys = ", ".join(one.key for one in pending)
            said = f"A restart would change {keys}." if pending else "No restart is pending."
            self._announcer.event(EventKind.PENDING_RESTART, f"{self._path} has changed. {said}")
        self._pending = pending
        self._tell(pending)


def differences(running: NodeConfig, wanted: NodeConfig) -> tuple[PendingRestart, ...]:
    """Keys whose values differ, in the document's order."""
    return tuple(
        PendingRestart(key.name, key.text(running), key.text(wanted))
        for key in leaves(NodeConfig)
        if key.value(running) != key.value(wanted)
    )
