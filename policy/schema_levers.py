"""The sections that steer the levers: `pools`, `rebalance`, `hot`, `watermark` and `admission`.

`pools` holds the absolute bounds of both pools, checked against each other; the others say how each
lever may move. Checks that need the node's sizes are in ``bounds``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, StrictBool, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.schema_types import (
    PoolSize,
    PositiveDuration,
    Section,
    below,
    pool_size_text,
    sum_of_shares,
)
from hisparsed.policy.units import ByteSize, Duration, Fraction, format_duration, format_fraction

_ROUNDING = 1e-9


class PoolSettings(Section):
    """Absolute bounds of one pool; ``start`` of ``None``: it follows from the other pool or the
    law.
    """

    floor: PoolSize = 0.0
    """Minimum size of the pool."""
    ceiling: PoolSize = 1.0
    """Maximum size of the pool."""
    start: PoolSize | None = None
    """Size of the pool at start; ``null``: it follows from the other pool or the law."""

    @field_validator("ceiling")
    @classmethod
    def _ceiling_above_floor(cls, ceiling: int | float, info: ValidationInfo) -> int | float:
        floor = info.data.get("floor")
        if below(ceiling, floor):
            raise PydanticCustomError(
                "ceiling_below_floor",
                "the ceiling {ceiling} is below the floor {floor}; raise it or lower the floor",
                {"ceiling": pool_size_text(ceiling), "floor": pool_size_text(floor)},
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
                {
                    "start": pool_size_text(start),
                    "floor": pool_size_text(floor),
                    "ceiling": pool_size_text(ceiling),
                },
            )
        return start


class HiSparsePoolSettings(PoolSettings):
    """The pool that holds every sparse-MLA page."""

    floor: PoolSize = 0.5
    """Minimum size of the pool."""


class OffloadPoolSettings(PoolSettings):
    floor: PoolSize = 0.01
    """Minimum size of the pool."""
    ceiling: PoolSize = 0.5
    """Maximum size of the pool."""


class Pools(Section):
    hisparse: HiSparsePoolSettings = HiSparsePoolSettings()
    """Host blocks that back every sparse-MLA page."""
    offload: OffloadPoolSettings = OffloadPoolSettings()
    """Host chunks of the indexer KV."""
    reserve: PoolSize = 0.0
    """Host blocks that neither pool gets, as a size or a share of the host budget."""
    release_reserve: StrictBool = False
    """Whether the memory of reserve blocks is returned to the system, where the node can do
    that.
    """

    @field_validator("reserve")
    @classmethod
    def _reserve_leaves_the_floors(cls, reserve: int | float, info: ValidationInfo) -> int | float:
        hisparse, offload = info.data.get("hisparse"), info.data.get("offload")
        if hisparse is None or offload is None or not isinstance(reserve, float):
            return reserve
        floors = sum_of_shares(hisparse.floor, offload.floor)
        if floors >= 0 and floors + reserve > 1 + _ROUNDING:
            raise PydanticCustomError(
                "reserve_exceeds_budget",
                "the reserve {reserve} and the floors {hisparse} and {offload} add up to more "
                "than the host budget; lower the reserve to at most {most}",
                {
                    "reserve": pool_size_text(reserve),
                    "hisparse": pool_size_text(hisparse.floor),
                    "offload": pool_size_text(offload.floor),
                    "most": pool_size_text(max(0.0, 1 - floors)),
                },
            )
        return reserve

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
                {
                    "hisparse": pool_size_text(hisparse.floor),
                    "offload": pool_size_text(offload.floor),
                },
            )
        if 0 <= sum_of_shares(hisparse.ceiling, offload.ceiling) < 1 - _ROUNDING:
            raise PydanticCustomError(
                "ceilings_below_budget",
                "the ceilings {hisparse} and {offload} leave part of the host budget unused; "
                "raise one of them to at least 100% together",
                {
                    "hisparse": pool_size_text(hisparse.ceiling),
                    "offload": pool_size_text(offload.ceiling),
                },
            )
        total = sum_of_shares(hisparse.start, offload.start)
        if total >= 0 and not math.isclose(total, 1):
            raise PydanticCustomError(
                "starts_not_whole",
                "the starts {hisparse} and {offload} must add up to 100% of the host budget; "
                "give only one and the other follows",
                {
                    "hisparse": pool_size_text(hisparse.start),
                    "offload": pool_size_text(offload.start),
                },
            )
        return offload


def _auto_or(tag: str) -> Discriminator:
    """Distinguishes the word ``auto`` from a value, which is tagged ``tag``."""
    return Discriminator(lambda value: "auto" if value == "auto" else tag)


AutoDuration: TypeAlias = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[PositiveDuration, Tag("time")],
    _auto_or("time"),
]
"""``"auto"``, or seconds."""


MAX_MULTIPLIER = 1_000.0
"""Hot rows / top-k; with top-k 2048 more than any model's longest call."""
AutoMultiplier: TypeAlias = Annotated[
    Annotated[Literal["auto"], Tag("auto")]
    | Annotated[float, Field(ge=1, le=MAX_MULTIPLIER), Tag("number")],
    _auto_or("number"),
]
"""``"auto"``, or hot rows / top-k."""


AutoFraction: TypeAlias = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Fraction, Tag("share")],
    _auto_or("share"),
]
"""``"auto"``, or a share."""
_RELEASED = 0.85
"""``admission.release_at: auto`` in ``engage_at``."""


class DeadBand(Section):
    """A move must exceed both."""

    relative: Fraction = 0.05
    """Smallest move, as a share of the blocks that equal reach needs."""
    absolute: PoolSize = 0.0025
    """Smallest move, as a size or a share of the host budget."""


class BackOff(Section):
    """After each undone move, the next one of its kind waits ``factor`` times longer."""

    factor: float = Field(default=2.0, ge=1, le=1_000)
    """Factor by which each undone move lengthens the next wait."""
    limit: float = Field(default=16.0, ge=1, le=10_000)
    """Maximum factor by which waits are lengthened."""
    forget: PositiveDuration = 3600.0
    """How long an undone move is counted."""


class MarginalValue(Section):
    """When `strategy: marginal-value` sees a difference between the pools."""

    noise_margin: Fraction = 0.3
    """How much more the next blocks must serve in one pool than in the other."""
    least_gain: int = Field(default=1_000, ge=0, le=10**9)
    """Tokens of prefix per minute that a move must be expected to save."""


class Rebalance(Section):
    strategy: Literal["equal-reach", "marginal-value", "fixed"] = "equal-reach"
    """Aim of the split: equal-reach, both pools hold the same tokens; marginal-value, equal reach
    corrected by what evicted prefixes would have served; fixed, the split stays at its start.
    """
    margin: Fraction = 0.2
    """How much more than the HiSparse pool's reach the offload pool holds."""
    window: PositiveDuration = 60.0
    """The conditions of a saving (a smaller offload pool) must hold for this long."""
    dead_band: DeadBand = DeadBand()
    """Differences that are too small to move for."""
    step: Fraction = Field(default=0.01, gt=0)
    """Maximum size of one saving, as a share of the host budget."""
    step_towards_safety: Fraction = Field(default=0.05, gt=0)
    """Maximum size of one move towards safety (a larger offload pool); at least ``step``."""
    cool_down: Duration = 60.0
    """Minimum time between two savings."""
    cool_down_towards_safety: Duration = 5.0
    """Minimum time between two moves towards safety; at most ``cool_down``."""
    hold_off: Duration = 300.0
    """How long the offload pool keeps blocks that it got for safety."""
    back_off: BackOff = BackOff()
    """Longer waits after moves that were undone or gained less than expected."""
    marginal: MarginalValue = MarginalValue()
    """When marginal value moves the split."""

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


RowBytes: TypeAlias = Annotated[ByteSize, Field(ge=2**20, le=2**50)]
"""Bytes per second; no bus of host memory is slower, and none so fast."""


class Hot(Section):
    """The multiplier: hot rows of a request / top-k, for any number of drafts.

    vLLM itself reserves (decode query length + 1) x top-k: 2x without drafts, 5x with three.
    """

    min: float = Field(default=1.0, ge=1, le=MAX_MULTIPLIER)
    """Minimum multiplier. The node's own minimum applies where it is higher: 1x with scratch
    blocks, else the decode query length (4x with three drafts).
    """
    max: AutoMultiplier = "auto"
    """Maximum multiplier, at least 1; ``auto`` is twice what vLLM reserves (4x without drafts, 10x
    with three), or what vLLM reserves where the lever may not act.
    """
    start: AutoMultiplier = "auto"
    """Multiplier at start; ``auto`` is what vLLM reserves, 2x without drafts and 5x with three.
    Kept between ``min`` and ``max``.
    """
    step: float = Field(default=0.5, ge=0.01, le=MAX_MULTIPLIER)
    """Size of one change, rounded to whole hot blocks."""
    free_low: Fraction = 0.05
    """Share of GPU blocks free below which the pool is under pressure."""
    free_high: Fraction = 0.25
    """Share of GPU blocks free above which there is room to grow."""
    window_shrink: PositiveDuration = 10.0
    """Pressure must last this long before the multiplier shrinks."""
    window_grow: PositiveDuration = 60.0
    """Room must last this long before the multiplier grows."""
    pcie_budget: RowBytes = 20 * 2**30
    """Bytes per second that missed rows may move, as the node counts them."""
    row_rate: RowBytes = 37 * 10**9
    """Bytes per second at which the node reads single rows from host memory: the cost of a missed
    row. 37GB is published for PCIe 5 x16.
    """
    prefill_bound_at: Fraction = Field(default=0.9, gt=0)
    """Share of the step token budget in use above which prefill, not KV, is the bottleneck."""
    core_bound_at: Fraction = Field(default=0.9, gt=0)
    """Share of the last minute that the engine core's thread computed schedules for, above which
    its CPU, not KV, is the bottleneck."""
    sharing: Literal["even", "marginal-gain"] = "even"
    """How running requests share the hot buffers: evenly, or by the requests' miss curves."""
    sharing_change: Fraction = Field(default=0.25, gt=0)
    """Maximum change of one request's hot buffer at a time, as a share of the multiplier."""
    sharing_gain: Fraction = 0.05
    """Share of the missed rows that a new division must be expected to save."""

    @field_validator("max")
    @classmethod
    def _max_above_min(cls, maximum: float | str, info: ValidationInfo) -> float | str:
        minimum = info.data.get("min")
        if isinstance(maximum, str) or minimum is None:
            return maximum
        if maximum < minimum:
            raise PydanticCustomError(
                "max_below_min",
                "max {max} is below min {min}; it must be at least that",
                {"max": maximum, "min": minimum},
            )
        return maximum

    @field_validator("start")
    @classmethod
    def _start_in_range(cls, start: float | str, info: ValidationInfo) -> float | str:
        minimum, maximum = info.data.get("min"), info.data.get("max")
        if isinstance(start, str) or minimum is None or maximum is None:
            return start
        if start < minimum or (not isinstance(maximum, str) and start > maximum):
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
    value: int | None = Field(default=None, ge=0, le=10**9)
    """Transition watermark in GPU blocks; ``null``: vLLM's own value."""


class AdmissionSettings(Section):
    order: Literal["auto", "arrival", "held-prefix-first"] = "auto"
    """The order in which waiting calls start; ``auto`` depends on coverage."""
    engage_at: Fraction = Field(default=1.0, gt=0)
    """Idle live set, as a share of the smaller reach, above which calls with held prefixes start
    first.
    """
    release_at: AutoFraction = "auto"
    """The share below which the arrival order returns; ``auto`` is 85 % of ``engage_at``."""
    release_after: Duration = 30.0
    """The share must stay below ``release_at`` for this long."""
    max_wait: PositiveDuration = 600.0
    """Upper limit of ``ageing``; a call held at the API is refused after it."""
    ageing: AutoDuration = "auto"
    """A call that waited this long starts first, at any cost; ``auto`` depends on the queue."""
    oldest_share: Fraction = 0.2
    """While held prefixes start first, the share of starts for the call that has waited longest, at
    any cost; ``0%``: only ``ageing`` limits the wait.
    """
    max_running: int | None = Field(default=None, ge=1, le=10**6)
    """Maximum number of running requests; ``null``: vLLM's limit."""
    max_waiting_sessions: int | None = Field(default=None, ge=0, le=10**6)
    """While coverage is low, ``when_full`` applies to new sessions beyond this many waiting calls;
    ``null`` admits all.
    """
    when_full: Literal["wait", "refuse"] = "refuse"
    """A new session beyond the limit waits, or gets 429."""
    retry_after: PositiveDuration = 10.0
    """``Retry-After`` of a refused call."""
    max_context: int | None = Field(default=None, ge=1, le=10**9)
    """Longest call in tokens, prompt and requested output; ``null``: the model's limit."""
    over_max_context: Literal["wait", "refuse"] = "refuse"
    """A longer call waits until no other such call runs, or gets 400."""

    @property
    def release_share(self) -> float:
        """``release_at`` as a number."""
        return _RELEASED * self.engage_at if isinstance(self.release_at, str) else self.release_at

    @field_validator("release_at")
    @classmethod
    def _release_below_engage(cls, release: float | str, info: ValidationInfo) -> float | str:
        engage = info.data.get("engage_at")
        if engage is not None and not isinstance(release, str) and release >= engage:
            raise PydanticCustomError(
                "release_not_below_engage",
                "release_at {release} must be below engage_at {engage}, or the order would flap",
                {"release": format_fraction(release), "engage": format_fraction(engage)},
            )
        return release

    @field_validator("ageing")
    @classmethod
    def _ageing_within_max_wait(cls, ageing: float | str, info: ValidationInfo) -> float | str:
        most = info.data.get("max_wait")
        if most is not None and not isinstance(ageing, str) and ageing > most:
            raise PydanticCustomError(
                "ageing_above_max_wait",
                "ageing {ageing} is above max_wait {most}; it must be at most that",
                {"ageing": format_duration(ageing), "most": format_duration(most)},
            )
        return ageing
