"""The small files of the state folder, each replaced whole: a crash leaves the old or the new one.

``OverrideFile`` keeps the values that operators set, ``TargetFile`` the targets in force, so that a
restart continues where the node was. Disk errors are remembered and reported; they never stop the
node. The operators' group may read the files. The journal is separate.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparsed.atomic_file import write_atomically
from hisparsed.policy.bounds import hot_bounds, hot_unit, lease_blocks, shared_blocks, split_bounds
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.schedules import Override
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionRules, PoolGeometry

STATE_FILE_MODE = 0o640
EVIDENCE_FOLDER_MODE = 0o750


def write_state_file(path: Path, data: bytes) -> None:
    """Replace the whole of ``path``, also on disk. Raises ``OSError``; ``path`` is then
    unchanged."""
    write_atomically(path, data, mode=STATE_FILE_MODE, durable=True)


def save_evidence_file(
    folder: Path, prefix: str, at_unix_s: float, document: Mapping[str, Any], *, most: int
) -> Path:
    """Write one of at most ``most`` files, whole or not at all; the oldest are deleted.

    Names have the time and always increase; otherwise, after the clock was set back, the newest
    would be taken for the oldest. Raises ``OSError``.
    """
    folder.mkdir(mode=EVIDENCE_FOLDER_MODE, exist_ok=True)
    before = sorted(folder.glob(f"{prefix}-*.json"))
    milliseconds = int(at_unix_s * 1000)
    if before:
        milliseconds = max(milliseconds, _number(before[-1]) + 1)
    path = folder / f"{prefix}-{milliseconds:015d}.json"
    write_state_file(path, json.dumps(document, indent=1).encode())
    for old in before[: max(0, len(before) + 1 - most)]:
        old.unlink(missing_ok=True)
    return path


def _number(path: Path) -> int:
    """0 for a file with a foreign name."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


OVERRIDES_FILE_NAME = "overrides.json"


class OverrideFileError(Exception):
    """The file could not be used; the message says what was done with it."""


class _OverridesDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    overrides: tuple[Override, ...]


class OverrideFile:
    """``error`` says why the latest ``save`` failed; ``None`` when it did not."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / OVERRIDES_FILE_NAME
        self.error: str | None = None

    def load(self) -> tuple[Override, ...]:
        """The values kept; empty when the file does not exist.

        Raises ``OverrideFileError``; a file that cannot be understood is set aside first, if
        the disk lets it.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise OverrideFileError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            return _OverridesDocument.model_validate_json(data).overrides
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            aside = self.path.with_name(f"{OVERRIDES_FILE_NAME}.damaged")
            kept = f"it is kept as {aside}"
            try:
                self.path.replace(aside)
            except OSError as trouble:
                kept = f"it cannot be kept as {aside} ({trouble.strerror or trouble})"
            raise OverrideFileError(
                f"{self.path} is damaged ({first}); {kept} and none of its values is in effect"
            ) from None

    def save(self, overrides: Sequence[Override]) -> None:
        """Replace the file, so that a crash leaves the old or the new one."""
        data = _OverridesDocument(overrides=tuple(overrides)).model_dump_json(indent=2).encode()
        try:
            write_state_file(self.path, data)
        except OSError as error:
            self.error = f"{self.path} cannot be written: {error.strerror or error}"
        else:
            self.error = None


log = logging.getLogger("hisparsed.control")

TARGETS_FILE_NAME = "targets.json"


@dataclass(frozen=True, slots=True)
class Targets:
    """The values that the engine last confirmed, with the admission."""

    offload_target_blocks: Annotated[int, Field(ge=0)]
    multiplier: Annotated[float, Field(gt=0)]
    admission: AdmissionRules


class _TargetsDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    policy_hash: str
    geometry: PoolGeometry
    targets: Targets


class TargetFile:
    """``targets.json`` in ``folder``. Errors with it are logged and never stop the node."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TARGETS_FILE_NAME
        self._saved: _TargetsDocument | None = None
        self._owed: _TargetsDocument | None = None
        self.error: str | None = None
        """Why the latest ``save`` or ``retry`` failed; ``None`` when it did not."""

    def load(self, policy_hash: str, geometry: PoolGeometry) -> Targets | None:
        """The targets kept for this policy on this node; ``None`` if there are none."""
        try:
            document = _TargetsDocument.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s; it is ignored.", self.path, error.strerror)
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "document"
            log.warning(
                "%s is damaged or not valid in this version (%s: %s); it is ignored.",
                self.path,
                place,
                first["msg"],
            )
            return None
        for what, kept, now in (
            ("policy", document.policy_hash, policy_hash),
            ("node", document.geometry, geometry),
        ):
            if kept != now:
                log.info("%s is of another %s; the policy's start values apply.", self.path, what)
                return None
        return document.targets

    def save(self, policy_hash: str, geometry: PoolGeometry, targets: Targets) -> None:
        """Replace the file, so that a crash leaves the old or the new one."""
        document = _TargetsDocument(policy_hash=policy_hash, geometry=geometry, targets=targets)
        if document != self._saved:
            self._write(document)

    @property
    def owed(self) -> bool:
        """Whether the latest targets are not in the file yet."""
        return self._owed is not None

    def retry(self) -> None:
        """Write the targets that could not be written before."""
        if self._owed is not None:
            self._write(self._owed)

    def _write(self, document: _TargetsDocument) -> None:
        try:
            write_state_file(self.path, document.model_dump_json(indent=2).encode())
        except OSError as error:
            if self.error is None:
                log.warning(
                    "%s cannot be written: %s; a restart begins with earlier targets, or with the "
                    "policy's start values.",
                    self.path,
                    error.strerror or error,
                )
            self.error = f"{self.path} cannot be written: {error.strerror or error}"
            self._owed = document
            return
        self._saved, self._owed, self.error = document, None, None


def with_kept_targets(
    commands: EngineCommand, targets: Targets, policy: Policy, geometry: PoolGeometry
) -> EngineCommand:
    """The start's commands with the kept targets instead of the policy's start values.

    Levers that the policy may not act on stay as they are.
    """
    if commands.offload_target_blocks is not None:
        blocks = split_bounds(policy, geometry).clamp(targets.offload_target_blocks)
        commands = replace(
            commands,
            offload_target_blocks=blocks,
            hisparse_target_blocks=shared_blocks(policy, geometry) - blocks,
        )
    if commands.multiplier is not None:
        lease = hot_bounds(policy, geometry).clamp(lease_blocks(geometry, targets.multiplier))
        commands = replace(commands, multiplier=lease * hot_unit(geometry))
    if commands.admission is not None:
        # The limits are the policy's; the order and its ageing were learnt.
        kept = targets.admission
        commands = replace(
            commands,
            admission=replace(
                commands.admission,
                order=kept.order,
                ageing_s=kept.ageing_s,
                max_waiting_sessions=kept.max_waiting_sessions,
            ),
        )
    return commands
