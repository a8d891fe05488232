"""How each lever may move: the `rebalance`, `hot`, `watermark` and `admission` sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.pool_sizes import PoolSize
from hisparsed.policy.schema_base import PositiveDuration, Section
from hisparsed.policy.units import (
    ByteSize,
    Duration,
    Fraction,
    format_duration,
    format_fraction,
)


class DeadBand(Section):
    """A move must be worth more than both."""

    relative: Fraction = 0.05
    """Of the blocks that equal reach needs."""
    absolute: PoolSize = 0.0025


class BackOff(Section):
    """Each undone move makes the next one of its kind wait ``factor`` times longer."""

    factor: float = Field(default=2.0, ge=1)
    limit: float = Field(default=16.0, ge=1)
    forget: PositiveDuration = 3600.0


class Rebalance(Section):
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


class Hot(Section):
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


class WatermarkSettings(Section):
    value: int | None = Field(default=None, ge=0)
    """GPU blocks; ``None`` is vLLM's own value."""


class AdmissionSettings(Section):
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
