"""The policy in force: loaded whole and checked, swapped, or the last good one kept.

Reading happens in ``reload`` only, called for SIGHUP and by the API; the control loop takes
what is active at its next tick. Watches no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.policy.bounds import problems
from hisparsed.policy.document import ConfigError, Loaded, load_document
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Geometry


@dataclass(frozen=True, slots=True)
class ActivePolicy:
    """``generation`` rises by one with every policy that replaced another."""

    value: Policy
    generation: int
    content_hash: str
    """SHA-256 of the document, hexadecimal."""
    path: Path
    text: str
    loaded_unix_s: float


class ReloadOutcome(StrEnum):
    LOADED = "loaded"
    UNCHANGED = "unchanged"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Reload:
    """What came of one reload; ``error`` says why a policy was rejected, with its lines."""

    outcome: ReloadOutcome
    active: ActivePolicy
    error: str | None = None


class PolicySource:
    """``wall_clock`` is Unix seconds. Raises ``ConfigError`` when the first policy is bad."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._geometry: Geometry | None = None
        self._active = self._activate(load_document(path, Policy), generation=1)
        self.reload_failures = 0
        self.last_error: str | None = None
        """Why the latest reload was rejected; ``None`` after one that was not."""

    @property
    def active(self) -> ActivePolicy:
        return self._active

    def bind(self, geometry: Geometry) -> None:
        """Tell the node's sizes; from now on a policy must be possible on this node.

        Raises ``UserError`` when the active one is not.
        """
        found = problems(self._active.value, geometry)
        if found:
            raise UserError(_impossible(self._path, found))
        self._geometry = geometry

    def reload(self) -> Reload:
        """Load the document anew; anything wrong with it leaves the active policy alone."""
        try:
            loaded = load_document(self._path, Policy)
        except ConfigError as error:
            return self._rejected(error.render())
        if self._geometry is not None:
            found = problems(loaded.value, self._geometry)
            if found:
                return self._rejected(_impossible(self._path, found))
        self.last_error = None
        if loaded.content_hash == self._active.content_hash:
            return Reload(ReloadOutcome.UNCHANGED, self._active)
        self._active = self._activate(loaded, self._active.generation + 1)
        return Reload(ReloadOutcome.LOADED, self._active)

    def _activate(self, loaded: Loaded[Policy], generation: int) -> ActivePolicy:
        return ActivePolicy(
            loaded.value,
            generation,
            loaded.content_hash,
            loaded.path,
            loaded.text,
            self._wall_clock(),
        )

    def _rejected(self, error: str) -> Reload:
        self.reload_failures += 1
        self.last_error = error
        return Reload(ReloadOutcome.REJECTED, self._active, error)


def _impossible(path: Path, found: tuple[str, ...]) -> str:
    return "\n".join(f"{path}: {problem}" for problem in found)
