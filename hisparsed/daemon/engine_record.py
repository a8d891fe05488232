"""Keeps which values an engine last served with, and which do not start: `engine.json`.

So that a daemon that is started anew knows as much as the one before. Trouble with the file is
logged and stops nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hisparsed.config.node import NodeConfig
from hisparsed.control.state_file import write_state_file
from hisparsed.daemon.engine_values import EngineValues, restored

log = logging.getLogger("hisparsed.daemon")

FILE_NAME = "engine.json"


class PutAside(BaseModel):
    """Values that did not start, by their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    at_unix_s: float
    error: str


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    good: dict[str, Any] | None = None
    put_aside: PutAside | None = None


class EngineRecord:
    """``engine.json`` in ``folder``; read once, written at each change."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._document = self._load()

    def good(self, daemon: NodeConfig) -> EngineValues | None:
        """The last good values on the node of ``daemon``; ``None`` where none are known."""
        if self._document.good is None:
            return None
        try:
            return restored(self._document.good, daemon)
        except ValueError as error:
            log.warning("%s: its last good values are not of this version: %s", self.path, error)
            return None

    @property
    def put_aside(self) -> PutAside | None:
        return self._document.put_aside

    def is_put_aside(self, values: EngineValues) -> bool:
        aside = self._document.put_aside
        return aside is not None and aside.digest == values.digest()

    def keep_good(self, values: EngineValues) -> None:
        """An engine serves with these; what was put aside for them no longer is."""
        aside = self._document.put_aside
        if aside is not None and aside.digest == values.digest():
            aside = None
        self._save(_Document(good=values.document(), put_aside=aside))

    def put(self, values: EngineValues, error: str, at_unix_s: float) -> None:
        """Put ``values`` aside in the place of what was."""
        aside = PutAside(digest=values.digest(), at_unix_s=at_unix_s, error=error)
        self._save(self._document.model_copy(update={"put_aside": aside}))

    def _load(self) -> _Document:
        try:
            return _Document.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return _Document()
        except (OSError, ValidationError) as error:
            log.warning("%s cannot be read (%s); no last good values are known.", self.path, error)
            return _Document()

    def _save(self, document: _Document) -> None:
        if document == self._document:
            return
        self._document = document
        try:
            write_state_file(self.path, document.model_dump_json(indent=2).encode())
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; a restart of the daemon will not know it.",
                self.path,
                error.strerror or error,
            )
