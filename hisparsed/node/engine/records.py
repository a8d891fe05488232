"""The files of the supervision in the state folder: values, restarts, and evidence of ends.

`engine.json` has the values that an engine last served with and those that do not start, so that a
new daemon knows as much as the one before. `restarts.json` has the restarts after a stall, in Unix
seconds. `engine-ends/` has a few small files about engines that ended unasked, the oldest are
deleted first; they hold no prompts, no tokens and no request names. Errors with `engine.json` are
logged and stop nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparsed.canary.watch import recent_sentences
from hisparsed.config.node import NodeConfig
from hisparsed.control.journal.records import SNAPSHOT_JSON, TickRecord, jsonable
from hisparsed.control.state_files import save_evidence_file, write_state_file
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.document import Status
from hisparsed.logs.ring import LogLine
from hisparsed.node.engine.values import EngineValues, values_from

log = logging.getLogger("hisparsed.daemon")

ENGINE_FILE = "engine.json"


class Quarantined(BaseModel):
    """Values that did not start, by their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    at_unix_s: float
    error: str


class _Document(BaseModel):
    """The file; its key for quarantined values is that of version 0.1.0."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, serialize_by_alias=True
    )

    version: Literal[1] = 1
    good: dict[str, Any] | None = None
    start_s: float | None = Field(default=None, ge=0)
    """Seconds that the last start took."""
    quarantined: Quarantined | None = Field(default=None, alias="put_aside")


class EngineRecord:
    """``engine.json`` in ``folder``; read once, written at each change."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ENGINE_FILE
        self._document = self._load()

    def good(self, daemon: NodeConfig) -> EngineValues | None:
        """The last good values on the node of ``daemon``; ``None`` where none are known."""
        if self._document.good is None:
            return None
        try:
            return values_from(self._document.good, daemon)
        except ValueError as error:
            log.warning(
                "%s: its last good values are not valid in this version: %s", self.path, error
            )
            return None

    @property
    def quarantined(self) -> Quarantined | None:
        return self._document.quarantined

    def is_quarantined(self, values: EngineValues) -> bool:
        quarantined = self._document.quarantined
        return quarantined is not None and quarantined.digest == values.digest()

    @property
    def start_s(self) -> float | None:
        """Seconds that the last start took; ``None`` before any."""
        return self._document.start_s

    def keep_good(self, values: EngineValues, start_s: float | None = None) -> None:
        """An engine serves with these values after a start of ``start_s`` seconds; they leave the
        quarantine."""
        quarantined = self._document.quarantined
        if quarantined is not None and quarantined.digest == values.digest():
            quarantined = None
        self._save(_Document(good=values.document(), quarantined=quarantined, start_s=start_s))

    def quarantine(self, values: EngineValues, error: str, at_unix_s: float) -> None:
        """Quarantine ``values`` instead of earlier ones."""
        quarantined = Quarantined(digest=values.digest(), at_unix_s=at_unix_s, error=error)
        self._save(self._document.model_copy(update={"quarantined": quarantined}))

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
                "%s cannot be written: %s; a restart of the daemon will lose it.",
                self.path,
                error.strerror or error,
            )


FOLDER = "engine-ends"
MOST_FILES = 8
MOST_LINES = 200
_TELLS_OF_REQUESTS = ("vllm.logging_utils.dump_input", "vllm.entrypoints")
"""Loggers of vLLM that may write down what requests hold."""


def evidence_document(
    why: str,
    at_unix_s: float,
    *,
    processes: Sequence[str],
    status: Status,
    last: TickOutcome | None,
    lines: Iterable[LogLine],
    ticks: Iterable[TickRecord],
) -> dict[str, Any]:
    """All facts about the end, as plain JSON values; newest last."""
    report = None
    if last is not None:
        report = SNAPSHOT_JSON.dump_python(last.record.snapshot, mode="json")
        del report["requests_hot"]
    return {
        "at_unix_s": at_unix_s,
        "why": why,
        "processes": list(processes),
        "decisions": recent_sentences(ticks),
        "log": [
            line.model_dump() for line in lines if not line.logger.startswith(_TELLS_OF_REQUESTS)
        ][-MOST_LINES:],
        "report": report,
        "status": jsonable(status),
    }


def start_error(lines: Sequence[LogLine]) -> str | None:
    """The error that ended the start of an engine, from the last traceback that it logged; oldest
    first."""
    for line in reversed(lines):
        if line.level >= logging.ERROR and "Traceback (most recent call last)" in line.text:
            words = [one for one in line.text.splitlines() if one and not one.startswith(" ")]
            return words[-1]
    return None


def save_evidence(state_dir: Path, document: dict[str, Any]) -> Path:
    """Write one file, whole or not at all, and drop the oldest beyond ``MOST_FILES``.

    Raises ``OSError``.
    """
    return save_evidence_file(
        state_dir / FOLDER, "end", document["at_unix_s"], document, most=MOST_FILES
    )


RESTARTS_FILE = "restarts.json"


class RestartFile:
    """When an engine was restarted because of a stall, kept over restarts; Unix seconds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESTARTS_FILE

    def since(self, unix_s: float) -> list[float]:
        """Restarts since ``unix_s``; none if the file is missing or invalid."""
        try:
            kept = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning(
                "%s cannot be read (%s); the count of restarts begins at 0.", self.path, error
            )
            return []
        times = kept if isinstance(kept, list) else []
        return [float(one) for one in times if isinstance(one, int | float) and one >= unix_s]

    def save(self, times: list[float]) -> None:
        """Replace the file. Raises ``OSError``."""
        write_state_file(self.path, json.dumps(times).encode())
