"""What the OpenAI side grants a client that sends or reads slowly, and how many of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hisparsed.policy.units import Duration

Patience = Annotated[Duration, Field(gt=0)]


class ApiLimits(BaseModel):
    """Of one listener. Bodies are bounded at 64 MiB, headers at 64 KiB."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connections: int = Field(default=4_096, ge=16, le=100_000)
    """When all are in use, the client goes that has been idle or sending for longest."""
    header_timeout: Patience = 10.0
    """From connecting, or a request's first byte, until its headers are whole."""
    body_timeout: Patience = 60.0
    """From the headers until the body is whole."""
    idle_timeout: Patience = 75.0
    """Between two requests of one connection."""
    read_timeout: Patience = 60.0
    """While a client takes nothing of its answer; its call is ended then."""
