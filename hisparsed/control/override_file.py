"""Keeps what operators set over a restart: one small file, replaced whole.

Trouble with the disk is remembered and told, never raised while saving: what an operator set at
night must hold now, even where it cannot be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hisparsed.control.state_file import write_state_file
from hisparsed.policy.override import Override

FILE_NAME = "overrides.json"


class OverrideFileError(Exception):
    """The file could not be used; the message says what became of it."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    overrides: tuple[Override, ...]


class OverrideFile:
    """``error`` says why the latest ``save`` failed; ``None`` when it did not."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.error: str | None = None

    def load(self) -> tuple[Override, ...]:
        """What was kept; nothing when there is no file.

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
            return _Document.model_validate_json(data).overrides
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            aside = self.path.with_name(f"{FILE_NAME}.damaged")
            kept = f"it is kept as {aside}"
            try:
                self.path.replace(aside)
            except OSError as trouble:
                kept = f"it cannot be kept as {aside} ({trouble.strerror or trouble})"
            raise OverrideFileError(
                f"{self.path} is damaged ({first}); {kept} and nothing of it holds"
            ) from None

    def save(self, overrides: Sequence[Override]) -> None:
        """Replace the file, so that a crash leaves the old or the new one."""
        data = _Document(overrides=tuple(overrides)).model_dump_json(indent=2).encode()
        try:
            write_state_file(self.path, data)
        except OSError as error:
            self.error = f"{self.path} cannot be written: {error.strerror or error}"
        else:
            self.error = None
