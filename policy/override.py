"""A value that an operator put above the document for a time; data only.

Who keeps it, and what becomes of it when the document changes, is the daemon's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hisparsed.policy.schedules import Scalar

LONGEST_S = 366 * 86_400.0
"""A value that is to last longer is set until it is unset, or written into the document."""


@dataclass(frozen=True, slots=True)
class Override:
    """``expires_unix_s`` of ``None`` lasts until it is unset."""

    key: str
    value: Scalar
    """As written; units are read with the rest of the document."""
    actor: str
    set_unix_s: float
    expires_unix_s: float | None

    def expired(self, unix_s: float) -> bool:
        return self.expires_unix_s is not None and unix_s >= self.expires_unix_s

    def moved(self, by_s: float) -> Override:
        """As long as before, on a clock that was set by so much."""
        expires = self.expires_unix_s
        return replace(
            self,
            set_unix_s=self.set_unix_s + by_s,
            expires_unix_s=None if expires is None else expires + by_s,
        )
