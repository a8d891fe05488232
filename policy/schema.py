"""The policy document: what an operator may say, with units, defaults and cross-checks.

Unknown keys are refused. Checks that need the node (its budget and its largest request)
are in ``bounds``. Every default suits a production node.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.reasons import Lever
from hisparsed.policy.schema_base import PositiveDuration, Section
from hisparsed.policy.schema_levers import AdmissionSettings, Hot, Rebalance, WatermarkSettings
from hisparsed.policy.schema_pools import Pools
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
    """``None``: the mode of the whole policy."""


class Levers(Section):
    split: LeverSettings = LeverSettings()
    multiplier: LeverSettings = LeverSettings()
    admission: LeverSettings = LeverSettings()
    watermark: LeverSettings = LeverSettings()


class Policy(Section):
    version: Literal[1]
    mode: Mode = Mode.ACT
    tick: Tick = 1.0
    stale_after: PositiveDuration = 5.0
    levers: Levers = Levers()
    pools: Pools = Pools()
    rebalance: Rebalance = Rebalance()
    hot: Hot = Hot()
    watermark: WatermarkSettings = WatermarkSettings()
    admission: AdmissionSettings = AdmissionSettings()

    @field_validator("stale_after")
    @classmethod
    def _stale_after_ticks(cls, stale_after: float, info: ValidationInfo) -> float:
        tick = info.data.get("tick")
        if tick is not None and stale_after < 2 * tick:
            raise PydanticCustomError(
                "stale_after_too_short",
                "stale_after {stale_after} is under two ticks of {tick}, so every late "
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

    def mode_of(self, lever: Lever) -> Mode:
        """The more cautious of the policy's mode and the lever's own."""
        own: LeverSettings = getattr(self.levers, lever.value)
        return max(self.mode, own.mode or self.mode, key=_CAUTION.__getitem__)
