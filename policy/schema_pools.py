"""The `pools` section: absolute bounds of both pools, checked against each other."""

from __future__ import annotations

import math

from pydantic import StrictBool, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.pool_sizes import PoolSize, below, shown, sum_of_shares
from hisparsed.policy.schema_base import Section

_ROUNDING = 1e-9


class PoolSettings(Section):
    """Absolute bounds of one pool; ``start`` of ``None`` leaves it to the other or the law."""

    floor: PoolSize = 0.0
    """The pool never gets smaller than this."""
    ceiling: PoolSize = 1.0
    """The pool never gets larger than this."""
    start: PoolSize | None = None
    """What the pool begins with; ``null`` leaves it to the other pool or the law."""

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
    """The pool that holds every sparse-MLA page."""

    floor: PoolSize = 0.5
    """The pool never gets smaller than this."""


class OffloadPoolSettings(PoolSettings):
    floor: PoolSize = 0.01
    """The pool never gets smaller than this."""
    ceiling: PoolSize = 0.5
    """The pool never gets larger than this."""


class Pools(Section):
    hisparse: HiSparsePoolSettings = HiSparsePoolSettings()
    """Host blocks that back every sparse-MLA page."""
    offload: OffloadPoolSettings = OffloadPoolSettings()
    """Host chunks of the indexer KV."""
    reserve: PoolSize = 0.0
    """Host blocks that neither pool gets, as a size or a share of the host budget."""
    release_reserve: StrictBool = False
    """Whether the memory of reserve blocks goes back to the system, where the node can."""

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
                    "reserve": shown(reserve),
                    "hisparse": shown(hisparse.floor),
                    "offload": shown(offload.floor),
                    "most": shown(max(0.0, 1 - floors)),
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
