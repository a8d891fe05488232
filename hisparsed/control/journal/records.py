"""The entries of the journal: the record of one tick, and events.

Also their flat views for the API. A number that JSON cannot hold becomes null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, computed_field

from hisparsed.engine.messages import ApplyResult
from hisparsed.policy.decisions import Decision, EngineCommand, LeverDecision
from hisparsed.policy.events import EventKind, EventLevel
from hisparsed.policy.forecasts import Figure, Outcome
from hisparsed.policy.signals import Lever, Snapshot

SNAPSHOT_JSON: TypeAdapter[Snapshot] = TypeAdapter(Snapshot)
DECISION_JSON: TypeAdapter[Decision] = TypeAdapter(Decision)


@dataclass(frozen=True, slots=True)
class Difference:
    """One lever whose value in the engine differs from the command or the expectation."""

    lever: Lever
    wanted: float | str
    found: float | str


@dataclass(frozen=True, slots=True)
class Applied:
    """One command and its result, or an error, in which case nothing changed.

    ``bounded`` names the levers that the engine set to another value than asked.
    """

    command: EngineCommand
    result: ApplyResult | None
    error: str | None
    bounded: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The next report's view of the command of ``tick``; without differences it is confirmed."""

    tick: int
    differences: tuple[Difference, ...]


def _renamed(applied: Any) -> Any:
    """Version 0.1.0 wrote ``transition_watermark`` for a command's ``watermark``."""
    command = applied.get("command") if isinstance(applied, dict) else None
    if isinstance(command, dict) and "transition_watermark" in command:
        command["watermark"] = command.pop("transition_watermark")
    return applied


APPLIED_JSON: TypeAdapter[Applied | None] = TypeAdapter(
    Annotated[Applied | None, BeforeValidator(_renamed)]
)
CONFIRMATION_JSON: TypeAdapter[Confirmation | None] = TypeAdapter(Confirmation | None)


@dataclass(frozen=True, slots=True)
class TickRecord:
    """``sequence`` counts the records of one run of the daemon, from 1."""

    sequence: int
    at_unix_s: float
    policy_hash: str
    snapshot: Snapshot
    decision: Decision
    applied: Applied | None
    confirmed: Confirmation | None
    notable: frozenset[Lever]
    """Levers that act, or whose reason is not that of the tick before."""
    sentence: str | None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event; ``actor`` is who caused it, ``daemon`` if no user did."""

    sequence: int
    at_unix_s: float
    kind: EventKind
    actor: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The policy in force from ``at_unix_s`` on, as the API shows it."""

    at_unix_s: float
    generation: int
    document: dict[str, Any]


Record = TickRecord | EventRecord | PolicyRecord


class DecisionView(BaseModel):
    """One lever of one tick, flat, as the API and ``hisparsed explain`` show it."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    """Orders decisions and events of one run that have the same time."""
    at_unix_s: float
    tick: int
    policy_generation: int
    policy_hash: str
    lever: Lever
    code: str
    cause: str
    limited_by: str | None
    acts: bool
    notable: bool
    current: float | str
    wanted: float | str
    in_force: float | str | None
    """The value that the engine put in force, if it is not the wanted one."""
    error: str | None
    """Why the command of this tick failed."""
    figures: dict[str, float | None]
    sentence: str
    expected: dict[Figure, float] = {}
    """Expected results of this move."""
    outcome: Outcome | None = None
    """In the tick in which an earlier move is judged."""


class EventView(BaseModel):
    """An event, as the API shows it."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    at_unix_s: float
    kind: EventKind
    actor: str
    sentence: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def level(self) -> EventLevel:
        return self.kind.level


def view_event(record: EventRecord) -> EventView:
    return EventView(
        sequence=record.sequence,
        at_unix_s=record.at_unix_s,
        kind=record.kind,
        actor=record.actor,
        sentence=record.sentence,
    )


def view_tick(record: TickRecord) -> Iterator[DecisionView]:
    """The levers of a tick, in the order of ``Lever``."""
    for lever in record.decision.levers:
        yield view_lever(
            lever,
            record.decision,
            record.applied,
            sequence=record.sequence,
            at_unix_s=record.at_unix_s,
            policy_hash=record.policy_hash,
            notable=lever.lever in record.notable,
        )


def view_lever(
    lever: LeverDecision,
    decision: Decision,
    applied: Applied | None,
    *,
    sequence: int,
    at_unix_s: float,
    policy_hash: str,
    notable: bool,
) -> DecisionView:
    bounded = (
        next((d for d in applied.bounded if d.lever is lever.lever), None) if applied else None
    )
    return DecisionView(
        sequence=sequence,
        at_unix_s=at_unix_s,
        tick=decision.tick,
        policy_generation=decision.policy_generation,
        policy_hash=policy_hash,
        lever=lever.lever,
        code=lever.reason.value,
        cause=lever.cause.value,
        limited_by=lever.limited_by.value if lever.limited_by is not None else None,
        acts=lever.acts,
        notable=notable,
        current=lever.current,
        wanted=lever.wanted,
        in_force=bounded.found if bounded is not None else None,
        error=applied.error if applied is not None and lever.acts else None,
        figures={name: _finite(value) for name, value in lever.figures.items()},
        sentence=lever.sentence,
        expected=dict(lever.expected),
        outcome=lever.outcome,
    )


def jsonable(model: BaseModel) -> Any:
    """Plain JSON values; infinities and NaN become ``None``, which JSON cannot hold."""
    return json.loads(model.model_dump_json())


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
