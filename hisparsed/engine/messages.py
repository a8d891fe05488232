"""Typed messages between the daemon and the engine core: one report, one command.

They cross vLLM's utility call as plain dicts. Imports neither vLLM nor torch, so the daemon
and its tests can use them alone. Counters never go back while an engine lives.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import AdmissionOrder, EngineReport


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_REPORT: TypeAdapter[EngineReport] = TypeAdapter(EngineReport)


def report_to_wire(report: EngineReport) -> dict[str, Any]:
    """Plain values only, as vLLM's utility call carries them."""
    values: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return values


def report_from_wire(values: dict[str, Any]) -> EngineReport:
    """Raises ``ValueError`` naming the wrong field."""
    return _REPORT.validate_python(values)


_COMMAND: TypeAdapter[EngineCommand] = TypeAdapter(EngineCommand)


def command_to_wire(command: EngineCommand) -> dict[str, Any]:
    """Plain values of the fields that it changes."""
    values: dict[str, Any] = _COMMAND.dump_python(command, mode="json", exclude_defaults=True)
    return values


def command_from_wire(values: dict[str, Any]) -> EngineCommand:
    """Raises ``ValueError`` naming the unknown or wrong field."""
    unknown = values.keys() - {one.name for one in fields(EngineCommand)}
    if unknown:
        raise ValueError(f"a command has no {', '.join(sorted(unknown))}")
    return _COMMAND.validate_python(values)


class RequestRow(_Message):
    """One request. Rows are counted over all index groups; counters are totals so far."""

    request_id: str
    state: str
    """running, waiting or preempted."""
    residency: str | None
    """full, mixed or none; ``None`` while it holds no page."""
    context_tokens: int
    computed_tokens: int
    resident_share: float | None
    """Share of its sparse-MLA pages that are on the GPU."""
    hot_rows: int
    hot_capacity_rows: int
    references: int
    resident: int
    hits: int
    loads: int
    preemptions: int
    age_s: float
    """Since it arrived."""


class RequestTable(_Message):
    """Running requests first, then waiting ones in the order in which they would start."""

    rows: list[RequestRow]
    running: int
    waiting: int
    omitted: int
    """Requests beyond the longest table."""
    took_us: float
    """Engine-thread time that making it cost."""


Residency = Literal["full", "mixed", "none"]


class CanaryCall(_Message):
    """A request of the daemon's own, announced before it is sent."""

    request_id: str = Field(min_length=16)
    """Random, so that no client's request begins with it."""
    residency: Residency
    """The residency that it should have while it decodes; ``full`` leaves them alone."""


class CanaryReport(_Message):
    """The observations of one: decode steps by the residency in which they ran, and its cost."""

    full: int
    mixed: int
    none: int
    scheduled_tokens: int
    step_s: float
    """Its share, by tokens, of the time of its steps."""


class ApplyResult(_Message):
    """The values in force after a command; a target may be lower than asked."""

    offload_target_blocks: int
    lent_blocks: int
    reserve_target_blocks: int = 0
    reserve_blocks: int = 0
    multiplier: float
    lease_blocks: int
    transition_watermark: int
    admission_order: AdmissionOrder
    max_running: int
    apply_us: float
