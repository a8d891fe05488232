"""The `pools` section: absolute bounds of both pools, checked against each other."""

from __future__ import annotations

import math

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.pool_sizes import PoolSize, below, shown, sum_of_shares
from hisparsed.policy.schema_base import Section

_ROUNDING = 1e-9


class PoolSettings(Section):
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


class Pools(Section):
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
