"""The policy document: its keys, with units, defaults and cross-checks.

``Policy`` is the whole document; `canary` and `health`, how the node watches itself, are here too.
Unknown keys are refused. Checks that need the node (its budget and its largest request) are in
``bounds``, those of schedules together with the rest in ``effective``. Every default suits a
production node.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.problems import refuse
from hisparsed.policy.schedules import MAX_ENTRIES, Schedule
from hisparsed.policy.schema_levers import (
    AdmissionSettings,
    Hot,
    Pools,
    Rebalance,
    WatermarkSettings,
)
from hisparsed.policy.schema_types import PositiveDuration, Section
from hisparsed.policy.signals import Lever
from hisparsed.policy.units import Duration, Fraction, format_duration


class Canary(Section):
    """A request that the node sends to itself repeatedly; its answer must never change."""

    enabled: StrictBool = True
    """Whether it runs on schedule; `hisparsed canary --now` runs it in any case."""
    every: PositiveDuration = 600.0
    """Time from one round to the next."""
    after_move: Fraction = Field(default=0.05, gt=0)
    """Blocks moved since the last round that start another, as a share of the host budget."""
    least_gap: PositiveDuration = 60.0
    """Minimum time between two rounds; a skipped round is tried again after it."""
    most_waiting: Annotated[int, Field(ge=0, le=10**6)] = 0
    """A round is skipped while more calls wait, or while coverage is low."""
    prefix: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Length of its prompt / the model's top-k; at most a quarter of the longest call."""
    tokens: Annotated[int, Field(ge=8, le=1024)] = 24
    """Length of each of its three answers."""
    on_mismatch: Literal["freeze", "freeze-and-not-ready"] = "freeze"
    """After a different answer: freeze every lever, or also answer not ready to routers."""

    @field_validator("least_gap")
    @classmethod
    def _gap_within_period(cls, least_gap: float, info: ValidationInfo) -> float:
        every = info.data.get("every")
        if every is not None and least_gap > every:
            raise PydanticCustomError(
                "gap_above_period",
                "least_gap {gap} is above every {every}; it must be at most that",
                {"gap": format_duration(least_gap), "every": format_duration(every)},
            )
        return least_gap


class Health(Section):
    """The reaction when calls make no progress for `stall_after` while memory is free."""

    on_stall: Literal["alarm", "restart"] = "alarm"
    """alarm: raise an alarm and answer not ready; restart: also restart the engine without
    draining.
    """
    most_restarts: Annotated[int, Field(ge=1, le=100)] = 3
    """Maximum per hour, counted over restarts of the daemon; then a stall only raises an alarm."""


class Mode(StrEnum):
    """``act`` moves levers, ``advise`` only reports what it would do, ``off`` does nothing."""

    ACT = "act"
    ADVISE = "advise"
    OFF = "off"


_CAUTION = {Mode.ACT: 0, Mode.ADVISE: 1, Mode.OFF: 2}

LEAST_RESTART_S = 10.0
"""A step with a long prefill takes seconds."""
Tick = Annotated[Duration, Field(ge=0.05)]
"""Shorter ones would cost the engine and the journal more than they are worth."""


class LeverSettings(Section):
    mode: Mode | None = None
    """``act``, ``advise`` or ``off`` for this lever; the more cautious of both modes applies."""


class Levers(Section):
    split: LeverSettings = LeverSettings()
    """How the host budget is divided."""
    multiplier: LeverSettings = LeverSettings()
    """How large hot buffers are."""
    admission: LeverSettings = LeverSettings()
    """Which calls start first, and how many may run and wait."""
    watermark: LeverSettings = LeverSettings()
    """When requests give up residency."""


class Policy(Section):
    version: Literal[1]
    """Version of the document format."""
    mode: Mode = Mode.ACT
    """``act`` moves levers, ``advise`` only reports what it would do, ``off`` does nothing."""
    tick: Tick = 1.0
    """Time between two decisions."""
    stale_after: PositiveDuration = 5.0
    """With a report of the engine older than this nothing moves; at least two ticks."""
    stall_after: Annotated[Duration, Field(ge=1)] = 30.0
    """Calls without progress for this long, while memory is free, are a stall: nothing moves."""
    levers: Levers = Levers()
    """A separate mode for each lever."""
    pools: Pools = Pools()
    """Absolute bounds of the two pools that share the host budget."""
    rebalance: Rebalance = Rebalance()
    """How the split between the pools moves."""
    hot: Hot = Hot()
    """The multiplier: hot rows of a request / top-k."""
    watermark: WatermarkSettings = WatermarkSettings()
    """When requests give up residency."""
    admission: AdmissionSettings = AdmissionSettings()
    """The order in which calls start, and how many."""
    canary: Canary = Canary()
    """A request that the node sends to itself repeatedly; its answer must never change."""
    health: Health = Health()
    """The reaction when calls make no progress for `stall_after` while memory is free."""
    schedules: Annotated[tuple[Schedule, ...], Field(max_length=MAX_ENTRIES)] = ()
    """Other values by time of day or by pressure; where entries overlap, the later one applies."""

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

    @field_validator("health")
    @classmethod
    def _a_restart_is_not_hasty(cls, health: Health, info: ValidationInfo) -> Health:
        stall_after = info.data.get("stall_after")
        if health.on_stall == "alarm" or stall_after is None:
            return health
        if stall_after < LEAST_RESTART_S:
            raise refuse(
                "hasty_restart",
                f"restart after a stall_after of {format_duration(stall_after)} would end engines "
                "that are in one long step",
                hint=f"set stall_after to at least {format_duration(LEAST_RESTART_S)}",
                key=("on_stall",),
            )
        return health

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
