"""What the control API answers, as models for its OpenAPI document and for clients.

Only what no other module has a model of: the status document, decisions, events, log lines and
the table of requests are described where they are made.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hisparsed.control.journal.records import DecisionView, EventView
from hisparsed.control.live_policy import ReloadOutcome
from hisparsed.control.status.document import ScheduleStatus
from hisparsed.logs.ring import LogLine
from hisparsed.policy.effective import Origin
from hisparsed.policy.keys import Change, PendingRestart
from hisparsed.policy.schedules import Override
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Liveness(_Answer):
    status: Literal["ok"]


class Readiness(_Answer):
    status: Literal["ready"]


class Decisions(_Answer):
    decisions: list[DecisionView]
    """One a lever and tick, newest tick first."""


class Events(_Answer):
    events: list[EventView]
    """Newest first."""


class LogLines(_Answer):
    lines: list[LogLine]
    """Oldest first."""


class HistoryTable(_Answer):
    columns: list[str]
    """`at_unix_s`, then paths into the status document."""
    rows: list[list[float | None]]
    """Oldest first."""


class TickAfter(_Answer):
    at_unix_s: float
    snapshot: dict[str, Any]


class TickDocument(_Answer):
    """One complete tick, as the journal has it. Parts that another version of the daemon wrote keep
    that version's form."""

    sequence: int
    at_unix_s: float
    policy_hash: str
    sentence: str | None
    decision: dict[str, Any]
    applied: dict[str, Any] | None
    """The command and what came of it; `null` where nothing was to be done."""
    snapshot: dict[str, Any]
    """What the decision was made from."""
    confirmation: dict[str, Any] | None
    """The command's effect as a later report showed it."""
    after: TickAfter | None
    """Up to a minute later."""


class KeySource(_Answer):
    """What does not apply to an origin is `null`; `line` is of the document."""

    origin: Origin = Field(alias="from")
    line: int | None
    schedule: str | None
    actor: str | None
    expires_unix_s: float | None


class PolicyRejection(_Answer):
    at_unix_s: float
    error: str
    actor: str


class PolicyInForce(_Answer):
    generation: int
    """Rises by one with every document, and every value set by an operator, that came or went."""
    content_hash: str
    """SHA-256 of the document's text."""
    file: str
    path: str
    """The same as `file`."""
    loaded_unix_s: float
    document: str
    value: dict[str, Any]
    """The policy as nested values in base units."""
    values: dict[str, str]
    """Every key as an operator writes it, with schedules and what operators set in it."""
    sources: dict[str, KeySource]
    overrides: list[Override]
    """Values that operators set, oldest first."""
    schedules: list[ScheduleStatus]
    pending_restart: list[PendingRestart]
    """Values that only a restart puts in force."""
    rejected: PolicyRejection | None
    """Set when the latest reload was rejected."""
    last_error: str | None


class KeyWords(_Answer):
    """One key of the policy in words; typed text is in backticks."""

    values: str
    """Allowed values, with their bounds."""
    default: str
    applies: str
    """When a new value takes effect."""
    meaning: str


class PolicyKeys(_Answer):
    keys: dict[str, KeyWords]
    """Every key that can be set, in the order of the document."""


class ProblemView(_Answer):
    line: int | None
    key: str
    message: str


class Judgement(_Answer):
    """The result that a reload of the document would have, this node's sizes included."""

    ok: bool
    problems: list[ProblemView]
    changes: list[Change]
    """Against the document in force."""
    left_out: list[str]
    """Keys of the document in force that this one does not give, so they have their defaults."""


class Changed(_Answer):
    """The policy after a change; it takes effect at the next tick."""

    generation: int
    content_hash: str
    frozen: list[Lever]
    overridden: dict[Lever, Mode]
    """Modes that an operator set above the document."""
    not_kept: str | None
    """Why values that were set would not survive a restart."""


class Reloaded(Changed):
    outcome: Literal[ReloadOutcome.LOADED, ReloadOutcome.UNCHANGED]


class ValueSet(Changed):
    override: Override
    pending_restart: list[PendingRestart]
