"""Lays out the service: unit, user, folders, configuration, dashboards. Writes files, runs nothing.

Idempotent: correct files are left alone, and a configuration file that was edited is never
overwritten. Enables and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Final

from hisparsed.atomic_file import write_atomically
from hisparsed.errors import UserError

_PLACEHOLDER: Final = "/usr/bin/hisparsed"
"""The program as the shipped unit names it."""
_CONFIG_MODE: Final = 0o644
_BACK_OFF_SINCE: Final = 254
"""First systemd that knows RestartSteps."""


class FileOutcome(StrEnum):
    """The result for one file."""

    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    KEPT = "kept"
    """It was edited; the shipped one is in the share folder."""


@dataclass(frozen=True, slots=True)
class InstallLayout:
    """The target folders. ``prefix`` is a package's, such as /usr; ``None`` is the administrator's.

    ``root`` is put before every path, for images and packages; the files do not mention it.
    """

    root: Path
    prefix: Path | None
    executable: Path
    systemd_version: int | None
    """The version of systemd on the target machine; ``None`` if it is not known."""

    @property
    def units(self) -> Path:
        return self._lib("systemd/system", "systemd/system")

    @property
    def share(self) -> Path:
        return (self.prefix or Path("/usr/local")) / "share/hisparsed"

    def _lib(self, below_lib: str, below_etc: str) -> Path:
        if self.prefix is None:
            return Path("/etc") / below_etc
        return self.prefix / "lib" / below_lib

    def planned(self) -> Iterator[Planned]:
        """Every file, in the order in which it is written."""
        unit = _shipped("systemd", "hisparsed.service").replace(
            _PLACEHOLDER, os.fspath(self.executable)
        )
        yield Planned(self.units / "hisparsed.service", unit)
        if self.systemd_version is not None and self.systemd_version >= _BACK_OFF_SINCE:
            text = _shipped("systemd", "back-off.conf")
            yield Planned(self.units / "hisparsed.service.d/back-off.conf", text)
        for name in ("sysusers", "tmpfiles"):
            folder = self._lib(f"{name}.d", f"{name}.d")
            yield Planned(folder / "hisparsed.conf", _shipped("systemd", f"{name}.conf"))
        for name in ("hisparsed.yaml", "policy.yaml"):
            yield Planned(Path("/etc/hisparsed") / name, _shipped("etc", name), is_config=True)
        schema = _shipped("etc", "policy.schema.json")
        yield Planned(Path("/etc/hisparsed/policy.schema.json"), schema)
        etc = Path(str(files("hisparsed"))) / "etc"
        for path in sorted(etc.rglob("*")):
            if path.suffix in (".yaml", ".json", ".service", ".env"):
                yield Planned(self.share / path.relative_to(etc), path.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Planned:
    path: Path
    text: str
    is_config: bool = False
    """A file that the administrator edits."""


@dataclass(frozen=True, slots=True)
class Installed:
    path: Path
    outcome: FileOutcome


def install_files(layout: InstallLayout, *, dry_run: bool) -> list[Installed]:
    """Write missing and old files; with ``dry_run`` only report them.

    Raises ``UserError`` where a file cannot be written.
    """
    return [
        Installed(one.path, _put(_below(layout.root, one.path), one, dry_run=dry_run))
        for one in layout.planned()
    ]


def _put(target: Path, planned: Planned, *, dry_run: bool) -> FileOutcome:
    try:
        found = target.read_text("utf-8")
    except FileNotFoundError:
        found = None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{target} cannot be read: {error}; move it away") from error
    if found == planned.text:
        return FileOutcome.UNCHANGED
    if found is not None and planned.is_config:
        return FileOutcome.KEPT
    if not dry_run:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # A unit half written would be read by the next daemon-reload.
            write_atomically(target, planned.text.encode(), mode=_CONFIG_MODE)
        except OSError as error:
            raise UserError(
                f"{target} cannot be written: {error.strerror or error}; run as root, or lay the "
                "files out elsewhere with --root"
            ) from error
    return FileOutcome.CREATED if found is None else FileOutcome.UPDATED


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _shipped(folder: str, name: str) -> str:
    path = Path(str(files("hisparsed"))) / folder / name
    if not path.is_file():
        raise UserError(f"{path} is missing; the installation is incomplete")
    return path.read_text("utf-8")
