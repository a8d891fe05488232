"""The policy document: what an operator may say, with units, defaults and cross-checks.

Unknown keys are refused. Checks that need the node (its budget and its largest request)
are in ``bounds``, those of schedules together with the rest in ``effective``. Every default
suits a production node.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.problems import refuse
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schedules import MAX_ENTRIES, Schedule
from hisparsed.policy.schema_base import PositiveDuration, Section
from hisparsed.policy.schema_levers import AdmissionSettings, Hot, Rebalance, WatermarkSettings
from hisparsed.policy.schema_pools import Pools
from hisparsed.policy.schema_watch import Canary, Health
from hisparsed.policy.units import Duration, format_duration


class Mode(StrEnum):
    """``act`` moves, ``advise`` only says what it would do, ``off`` leaves alone."""

    ACT = "act"
    ADVISE = "advise"
    OFF = "off"


_CAUTION = {Mode.ACT: 0, Mode.ADVISE: 1, Mode.OFF: 2}

Tick = Annotated[Duration, Field(ge=0.05)]
"""Shorter ones would ask the engine and fill the journal more than they tell."""


class LeverSettings(Section):
    mode: Mode | None = None
    """``act``, ``advise`` or ``off`` for this lever; the more cautious of both modes counts."""


class Levers(Section):
    split: LeverSettings = LeverSettings()
    """Who has how much of the host budget."""
    multiplier: LeverSettings = LeverSettings()
    """How large hot buffers are."""
    admission: LeverSettings = LeverSettings()
    """Which calls start first, and how many may run and wait."""
    watermark: LeverSettings = LeverSettings()
    """When requests give up residency."""


class Policy(Section):
    version: Literal[1]
    """Version of the document's form."""
    mode: Mode = Mode.ACT
    """``act`` moves, ``advise`` only says what it would do, ``off`` leaves alone."""
    tick: Tick = 1.0
    """Time between two decisions."""
    stale_after: PositiveDuration = 5.0
    """A report of the engine older than this moves nothing; at least two ticks."""
    stall_after: PositiveDuration = 30.0
    """Calls without progress for this long, while memory is free, are a stall: nothing moves."""
    levers: Levers = Levers()
    """A mode of its own for each lever."""
    pools: Pools = Pools()
    """Absolute bounds of the two pools that share the host budget."""
    rebalance: Rebalance = Rebalance()
    """How the split between the pools moves."""
    hot: Hot = Hot()
    """The multiplier: hot rows of a request / top-k."""
    watermark: WatermarkSettings = WatermarkSettings()
    """When requests give up residency."""
    admission: AdmissionSettings = AdmissionSettings()
    """In which order calls start, and how many."""
    canary: Canary = Canary()
    """A request of the node's own, asked again and again, whose answer must never change."""
    health: Health = Health()
    """What happens when calls stand still though memory is free, for `stall_after`."""
    schedules: Annotated[tuple[Schedule, ...], Field(max_length=MAX_ENTRIES)] = ()
    """Other values by time of day or by pressure; where entries overlap, the later one wins."""

    @field_validator("stale_after")
    @classmethod
    def _stale_after_ticks(cls, stale_after: float, info: ValidationInfo) -> float:
        tick = info.data.get("tick")
        if tick is not None and stale_after < 2 * tick:
            raise PydanticCustomError(
                "stale_after_too_short",
                "stale_after {stale_after} is under twice the tick {tick}, so every late "
                "report would be stale; use at least {least}",
                {
                    "stale_after": format_duration(stale_after),
                    "tick": format_duration(tick),
                    "least": format_duration(2 * tick),
                },
            )
        return stale_after

    @field_validator("rebalance")
    @classmethod
    def _fixed_needs_a_start(cls, rebalance: Rebalance, info: ValidationInfo) -> Rebalance:
        pools = info.data.get("pools")
        if pools is None or rebalance.strategy != "fixed":
            return rebalance
        if pools.hisparse.start is None and pools.offload.start is None:
            raise PydanticCustomError(
                "fixed_without_start",
                "strategy is fixed but neither pools.hisparse.start nor pools.offload.start "
                "says at what; set one of them",
                {},
            )
        return rebalance

    @field_validator("schedules")
    @classmethod
    def _names_differ(cls, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
        seen: set[str] = set()
        for index, entry in enumerate(schedules):
            if entry.name in seen:
                message = f'"{entry.name}" names an earlier entry already'
                raise refuse("name_twice", message, key=(index, "name"))
            seen.add(entry.name)
        return schedules

    def mode_of(self, lever: Lever) -> Mode:
        """The more cautious of the policy's mode and the lever's own."""
        own: LeverSettings = getattr(self.levers, lever.value)
        return max(self.mode, own.mode or self.mode, key=_CAUTION.__getitem__)
