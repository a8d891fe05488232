"""The doctor's part of the status document: what was found, how bad it is, how to put it right.

A model without behaviour. Not here: any looking; that is passed in.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """From best to worst."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    FATAL = "fatal"
    """A node must not start like this."""


class DoctorFinding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    """A stable name for scripts, such as `memlock`."""
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    seen_unix_s: float
    """When it was last looked for: what cannot change while a node runs, before its start only."""


class DoctorStatus(BaseModel):
    """``findings`` are those that are not well, the worst first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_unix_s: float
    """When the doctor last looked."""
    looking: bool = False
    error: str | None = None
    """Why the last look came to nothing; the findings are then of the one before."""
    checks: int
    """How many findings there are with those that are well."""
    fatal: int
    warnings: int
    findings: list[DoctorFinding]
