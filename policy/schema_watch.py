"""The `canary` and `health` sections: how the node watches itself, and what it does then.

Says nothing of levers; what a node does about a shortage of memory is in the other sections.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparsed.policy.schema_base import PositiveDuration, Section
from hisparsed.policy.units import Fraction, format_duration


class Canary(Section):
    """A request of the node's own, asked again and again, whose answer must never change."""

    enabled: StrictBool = True
    """Whether it is asked by itself; `hisparsed canary --now` asks it anyway."""
    every: PositiveDuration = 600.0
    """Time from one round to the next."""
    after_move: Fraction = Field(default=0.05, gt=0)
    """Blocks moved since the last round, as a share of the host budget, that ask for another."""
    least_gap: PositiveDuration = 60.0
    """Least time between two rounds; a round that was left out is tried again after it."""
    most_waiting: Annotated[int, Field(ge=0, le=10**6)] = 0
    """With more calls waiting, a round is left out; so it is while coverage is low."""
    prefix: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Length of its prompt / the model's top-k; never over a quarter of the longest call."""
    tokens: Annotated[int, Field(ge=8, le=1024)] = 24
    """Length of each of its three answers."""
    on_mismatch: Literal["freeze", "freeze-and-not-ready"] = "freeze"
    """After another answer: freeze every lever; or that, and tell routers to stay away."""

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
    """What happens when calls stand still though memory is free, for `stall_after`."""

    on_stall: Literal["alarm", "restart"] = "alarm"
    """alarm: tell, and answer not ready; restart: that, and restart the engine without draining."""
    most_restarts: Annotated[int, Field(ge=1, le=100)] = 3
    """For a stall, within an hour, over restarts of the daemon; then a stall only alarms."""
