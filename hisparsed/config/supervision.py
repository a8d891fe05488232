"""The `supervision` section of the node's document: how an engine that ends is started anew.

Settings only; what comes of them is in the daemon's ``supervision``.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.policy.document import refuse
from hisparsed.policy.units import Duration, format_duration

_PositiveDuration = Annotated[Duration, Field(gt=0)]


class SupervisionConfig(BaseModel):
    """An engine that dies or hangs is started anew inside the daemon, a few times."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    most_restarts: Annotated[int, Field(ge=0, le=1000, strict=True)] = 5
    """Within `window`; one more and the daemon ends with exit code 70. 0: it ends at once."""
    window: _PositiveDuration = 3600.0
    first_wait: _PositiveDuration = 1.0
    """Before the first restart; doubled with each further one in the window."""
    longest_wait: _PositiveDuration = 120.0
    """At most this long."""
    hang_after: _PositiveDuration | None = 120.0
    """An engine without a report for so long is killed and started anew; null: never. Longer than
    the longest step, shorter than the service manager's watchdog."""
    start_tries: Annotated[int, Field(ge=1, le=100, strict=True)] = 2
    """Failed starts after which changed values are put aside and the last good ones return."""

    @model_validator(mode="after")
    def _waits_in_order(self) -> Self:
        if self.longest_wait < self.first_wait:
            raise refuse(
                "wait_below_first",
                f"is below first_wait {format_duration(self.first_wait)}",
                hint="give at least that",
                key=("longest_wait",),
            )
        return self
