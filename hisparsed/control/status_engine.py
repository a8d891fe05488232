"""The engine's life in the status document: where it is, how often it ended, what is put aside.

A model without behaviour; the daemon's supervisor fills it. What a running engine reports is in
``observed`` instead.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from hisparsed.policy.restart import PendingRestart


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """Open calls end, new ones are refused; the engine is taken down after that."""
    RESTARTING = "restarting"
    """No engine: one is being taken down, or the next try is waited for."""
    FAILED = "failed"
    """Given up; the daemon ends."""
    STOPPED = "stopped"
    """Told to stop; what is left of the engine is being taken down."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineEnd(_Part):
    """An engine that ended, or did not start, without being asked to."""

    at_unix_s: float
    why: str
    processes: list[str] = []
    """Those of the engine, each with how it ended."""
    evidence: str | None = None
    """The file with what was known."""


class QuarantinedValues(_Part):
    """Values that an engine did not start with, so the last good ones are in force."""

    at_unix_s: float
    error: str
    changes: list[PendingRestart]
    """Against those that are in force."""


class EngineLifeStatus(_Part):
    state: EngineState
    since_unix_s: float
    sentence: str
    """All of it for people."""
    died_total: int = 0
    """Engines of this daemon that ended unasked."""
    restarts_total: int = 0
    """Engines that served after the first."""
    planned_restarts_total: int = 0
    ends_in_window: int = 0
    """Ends and failed starts that count against `supervision.most_restarts`."""
    most_restarts: int = 0
    last_start_s: float | None = None
    """How long the last start took."""
    next_try_unix_s: float | None = None
    last_exit: EngineEnd | None = None
    quarantined: QuarantinedValues | None = None
    """Set while the documents ask for what did not start."""
