"""The policy document: what an operator may say, with units, defaults and cross-checks.

Unknown keys are refused. Checks that need the node (its budget and its largest request)
are in ``bounds``. Every default suits a production node.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from hisparsed.policy.pool_sizes import PoolSize, below, shown, sum_of_shares
from hisparsed.policy.reasons import Lever
from hisparsed.policy.units import (
    ByteSize,
    Duration,
    Fraction,
    format_duration,
    format_fraction,
)


class Mode(StrEnum):
    """``act`` moves, ``advise`` only says what it would do, ``off`` leaves alone."""

    ACT = "act"
    ADVISE = "advise"
    OFF = "off"


_ROUNDING = 1e-9
_CAUTION = {Mode.ACT: 0, Mode.ADVISE: 1, Mode.OFF: 2}


PositiveDuration = Annotated[Duration, Field(gt=0)]
Tick = Annotated[Duration, Field(ge=0.05)]
"""Shorter ones would ask the engine and fill the journal more than they tell."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class LeverSettings(_Section):
    mode: Mode | None = None
    """``None``: the mode of the whole policy."""


class Levers(_Section):
    split: LeverSettings = LeverSettings()
    multiplier: LeverSettings = LeverSettings()
    admission: LeverSettings = LeverSettings()
    watermark: LeverSettings = LeverSettings()


class PoolSettings(_Section):
    """Absolute bounds of one pool; ``start`` of ``None`` leaves it to the other or the law."""

    floor: PoolSize = 0.0
    ceiling: PoolSize = 1.0
    start: PoolSize | None = None

    @field_validator("ceiling")
    @classmethod
    def _ceiling_above_floor(cls, ceiling: int | float, info: ValidationInfo) -> int | float:
        floor = info.data.get("floor")
        if below(ceiling, floor):
            raise PydanticCustomError(
                "ceiling_below_floor",
                "the ceiling {ceiling} is below the floor {floor}; raise it or lower the floor",
                {"ceiling": shown(ceiling), "floor": shown(floor)},
            )
        return ceiling

    @field_validator("start")
    @classmethod
    def _start_in_bounds(
        cls, start: int | float | None, info: ValidationInfo
    ) -> int | float | None:
        floor, ceiling = info.data.get("floor"), info.data.get("ceiling")
        if below(start, floor) or below(ceiling, start):
            raise PydanticCustomError(
                "start_out_of_bounds",
                "the start {start} is outside floor {floor} to ceiling {ceiling}",
                {"start": shown(start), "floor": shown(floor), "ceiling": shown(ceiling)},
            )
        return start


class HiSparsePoolSettings(PoolSettings):
    floor: PoolSize = 0.5


class OffloadPoolSettings(PoolSettings):
    floor: PoolSize = 0.01
    ceiling: PoolSize = 0.5


class Pools(_Section):
    hisparse: HiSparsePoolSettings = HiSparsePoolSettings()
    offload: OffloadPoolSettings = OffloadPoolSettings()

    @field_validator("offload")
    @classmethod
    def _pools_share_one_budget(
        cls, offload: OffloadPoolSettings, info: ValidationInfo
    ) -> OffloadPoolSettings:
        hisparse = info.data.get("hisparse")
        if hisparse is None:
            return offload
        if sum_of_shares(hisparse.floor, offload.floor) > 1 + _ROUNDING:
            raise PydanticCustomError(
                "floors_exceed_budget",
                "the floors {hisparse} and {offload} add up to more than the host budget; "
                "lower one of them to at most 100% together",
                {"hisparse": shown(hisparse.floor), "offload": shown(offload.floor)},
            )
        if 0 <= sum_of_shares(hisparse.ceiling, offload.ceiling) < 1 - _ROUNDING:
            raise PydanticCustomError(
                "ceilings_below_budget",
                "the ceilings {hisparse} and {offload} leave part of the host budget unused; "
                "raise one of them to at least 100% together",
                {"hisparse": shown(hisparse.ceiling), "offload": shown(offload.ceiling)},
            )
        total = sum_of_shares(hisparse.start, offload.start)
        if total >= 0 and not math.isclose(total, 1):
            raise PydanticCustomError(
                "starts_not_whole",
                "the starts {hisparse} and {offload} must add up to 100% of the host budget; "
                "give only one and the other follows",
                {"hisparse": shown(hisparse.start), "offload": shown(offload.start)},
            )
        return offload


class DeadBand(_Section):
    """A move must be worth more than both."""

    relative: Fraction = 0.05
    """Of the blocks that equal reach needs."""
    absolute: PoolSize = 0.0025


class BackOff(_Section):
    """Each undone move makes the next one of its kind wait ``factor`` times longer."""

    factor: float = Field(default=2.0, ge=1)
    limit: float = Field(default=16.0, ge=1)
    forget: PositiveDuration = 3600.0


class Rebalance(_Section):
    strategy: Literal["equal-reach", "fixed"] = "equal-reach"
    margin: Fraction = 0.2
    window: PositiveDuration = 60.0
    dead_band: DeadBand = DeadBand()
    step: Fraction = Field(default=0.01, gt=0)
    step_towards_safety: Fraction = Field(default=0.05, gt=0)
    cool_down: Duration = 60.0
    cool_down_towards_safety: Duration = 5.0
    hold_off: Duration = 300.0
    back_off: BackOff = BackOff()

    @field_validator("step_towards_safety")
    @classmethod
    def _safety_is_not_slower(cls, towards_safety: float, info: ValidationInfo) -> float:
        step = info.data.get("step")
        if step is not None and towards_safety < step:
            raise PydanticCustomError(
                "safety_step_below_step",
                "step_towards_safety {value} is below step {step}; it must be at least that",
                {"value": format_fraction(towards_safety), "step": format_fraction(step)},
            )
        return towards_safety

    @field_validator("cool_down_towards_safety")
    @classmethod
    def _safety_waits_no_longer(cls, towards_safety: float, info: ValidationInfo) -> float:
        cool_down = info.data.get("cool_down")
        if cool_down is not None and towards_safety > cool_down:
            raise PydanticCustomError(
                "safety_cool_down_above_cool_down",
                "cool_down_towards_safety {value} is above cool_down {cool_down}; "
                "it must be at most that",
                {"value": format_duration(towards_safety), "cool_down": format_duration(cool_down)},
            )
        return towards_safety


class Hot(_Section):
    """The multiplier: hot rows of a request / (top-k x decode query length)."""

    min: float = Field(default=1.0, ge=1)
    max: float = Field(default=4.0, ge=1)
    start: float = Field(default=2.0, ge=1)
    step: float = Field(default=0.5, gt=0)
    free_low: Fraction = 0.05
    """Share of GPU blocks free below which the pool is under pressure."""
    free_high: Fraction = 0.25
    window_shrink: PositiveDuration = 10.0
    window_grow: PositiveDuration = 60.0
    pcie_budget: ByteSize = 20 * 2**30
    """Bytes a second that missed rows may move, counted as the node counts them."""

    @field_validator("max")
    @classmethod
    def _max_above_min(cls, maximum: float, info: ValidationInfo) -> float:
        minimum = info.data.get("min")
        if minimum is not None and maximum < minimum:
            raise PydanticCustomError(
                "max_below_min",
                "max {max} is below min {min}; it must be at least that",
                {"max": maximum, "min": minimum},
            )
        return maximum

    @field_validator("start")
    @classmethod
    def _start_in_range(cls, start: float, info: ValidationInfo) -> float:
        minimum, maximum = info.data.get("min"), info.data.get("max")
        if minimum is not None and maximum is not None and not minimum <= start <= maximum:
            raise PydanticCustomError(
                "start_out_of_range",
                "start {start} is outside min {min} to max {max}",
                {"start": start, "min": minimum, "max": maximum},
            )
        return start

    @field_validator("free_high")
    @classmethod
    def _thresholds_apart(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("free_low")
        if low is not None and high <= low:
            raise PydanticCustomError(
                "free_high_not_above_low",
                "free_high {high} must be above free_low {low}, or the multiplier would flap",
                {"high": format_fraction(high), "low": format_fraction(low)},
            )
        return high


class WatermarkSettings(_Section):
    value: int | None = Field(default=None, ge=0)
    """GPU blocks; ``None`` is vLLM's own value."""


class AdmissionSettings(_Section):
    order: Literal["auto", "arrival", "held-prefix-first"] = "auto"
    engage_at: Fraction = Field(default=0.7, gt=0)
    """Idle live set as a share of the smaller reach."""
    release_at: Fraction = 0.55
    release_after: Duration = 30.0
    ageing: PositiveDuration = 30.0
    max_running: int | None = Field(default=None, ge=1)
    max_waiting_sessions: int | None = Field(default=None, ge=0)
    retry_after: PositiveDuration = 10.0

    @field_validator("release_at")
    @classmethod
    def _release_below_engage(cls, release: float, info: ValidationInfo) -> float:
        engage = info.data.get("engage_at")
        if engage is not None and release >= engage:
            raise PydanticCustomError(
                "release_not_below_engage",
                "release_at {release} must be below engage_at {engage}, or the order would flap",
                {"release": format_fraction(release), "engage": format_fraction(engage)},
            )
        return release


class Policy(_Section):
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
