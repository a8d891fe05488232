"""Keeps the targets in force over a restart: one small file in the state folder.

A node that comes back begins where its policy had brought it, instead of learning anew.
Nothing of it holds unless policy document and node are the same; the policy's bounds apply to
it as to a start. The reserve is not in it: it follows from the policy and is never learnt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparsed.control.state_file import write_state_file
from hisparsed.policy.bounds import (
    hot_bounds,
    hot_unit,
    lease_blocks,
    shared_blocks,
    split_bounds,
)
from hisparsed.policy.decisions import Commands
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, Geometry

log = logging.getLogger("hisparsed.control")

FILE_NAME = "targets.json"


@dataclass(frozen=True, slots=True)
class Targets:
    """What the engine last confirmed, and the admission that went with it."""

    offload_target_blocks: Annotated[int, Field(ge=0)]
    multiplier: Annotated[float, Field(gt=0)]
    admission: Admission


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    policy_hash: str
    geometry: Geometry
    targets: Targets


class TargetFile:
    """``targets.json`` in ``folder``. Trouble with it is logged and never stops the node."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._saved: _Document | None = None
        self._owed: _Document | None = None
        self.error: str | None = None
        """Why the latest ``save`` or ``retry`` failed; ``None`` when it did not."""

    def load(self, policy_hash: str, geometry: Geometry) -> Targets | None:
        """What was kept for this policy on this node; ``None`` where nothing was."""
        try:
            document = _Document.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s; it is ignored.", self.path, error.strerror)
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "document"
            log.warning(
                "%s is damaged or not of this version (%s: %s); it is ignored.",
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
                log.info("%s is of another %s; the policy's start counts.", self.path, what)
                return None
        return document.targets

    def save(self, policy_hash: str, geometry: Geometry, targets: Targets) -> None:
        """Replace the file, so that a crash leaves the old or the new one."""
        document = _Document(policy_hash=policy_hash, geometry=geometry, targets=targets)
        if document != self._saved:
            self._write(document)

    @property
    def owed(self) -> bool:
        """Whether the latest targets are in no file yet."""
        return self._owed is not None

    def retry(self) -> None:
        """Write what could not be written before."""
        if self._owed is not None:
            self._write(self._owed)

    def _write(self, document: _Document) -> None:
        try:
            write_state_file(self.path, document.model_dump_json(indent=2).encode())
        except OSError as error:
            if self.error is None:
                log.warning(
                    "%s cannot be written: %s; a restart begins with the targets before, or with "
                    "the policy's start.",
                    self.path,
                    error.strerror or error,
                )
            self.error = f"{self.path} cannot be written: {error.strerror or error}"
            self._owed = document
            return
        self._saved, self._owed, self.error = document, None, None


def restored(commands: Commands, targets: Targets, policy: Policy, geometry: Geometry) -> Commands:
    """The start's commands with what was kept in the place of the policy's start values.

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
        # Limits are the policy's; what was learnt is the order, and what comes with it.
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
