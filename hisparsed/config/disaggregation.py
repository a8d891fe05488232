"""The node's part in prefill/decode disaggregation, as its document states it.

A prefill node keeps finished prompts for a decode node and listens; a decode node fetches them.
Which call goes where is a router's business.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.policy.document import refuse
from hisparsed.policy.units import Duration

_OF_ROLE: Final = {"host": "prefill", "port": "prefill", "lease": "prefill"} | {
    "timeout": "decode",
    "peers": "decode",
}


class DisaggregationConfig(BaseModel):
    """``role`` decides which of the other keys have a meaning; the rest are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["prefill", "decode"]
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address at which a prefill node listens, and which decode nodes are told."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 14579
    lease: Duration = Field(default=60.0, gt=0)
    """Seconds that a prefill node keeps a prefix for a decode node."""
    timeout: Duration = Field(default=10.0, gt=0)
    """Seconds after which a decode node computes the prompt itself."""
    peers: tuple[Annotated[str, Field(pattern=r"^.+:\d{1,5}$")], ...] = ()
    """Prefill nodes as host:port that a decode node fetches from; empty: on this machine."""

    @model_validator(mode="after")
    def _keys_are_of_the_role(self) -> Self:
        for key, role in _OF_ROLE.items():
            if key in self.model_fields_set and role != self.role:
                raise refuse(
                    "other_role",
                    f"has no meaning on a {self.role} node",
                    hint=f"leave it out, or set role: {role}",
                    key=(key,),
                )
        return self
