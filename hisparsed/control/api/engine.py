"""The engine's route on the control socket: what a restart would do, and doing it.

``EngineRestarter`` restarts engines; nothing is decided here.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hisparsed.control.api.endpoint import ActorBody, Endpoint, parse_body
from hisparsed.control.api.errors import ApiError
from hisparsed.control.api.socket import recorded_actor
from hisparsed.control.journal.records import jsonable
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.problems import ConfigError

LONGEST_DRAIN_S = 86_400.0


class RestartPlan(BaseModel):
    """The effect of an engine restart, done or planned."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sentence: str
    """All of it for people; shown before a confirmation."""
    open_requests: int
    drain_s: float
    """Open calls get this long; what is open then is cut off."""
    changes: list[PendingRestart]
    """What the new engine is started with that this one is not."""
    left: list[PendingRestart]
    """Values that take effect only when the daemon restarts."""
    begun: bool = False


class EngineBusyError(Exception):
    """No restart can begin now; the message says why."""


class EngineRestarter(Protocol):
    def plan_restart(self, drain_s: float | None) -> RestartPlan:
        """``None`` is the node's drain timeout. Raises ``EngineBusyError``, and ``ConfigError``
        when the node's document is invalid."""

    def restart(self, drain_s: float | None, *, actor: str) -> RestartPlan:
        """Begin it; raises as ``plan_restart``."""


class _RestartBody(ActorBody):
    drain_s: Annotated[float, Field(ge=0, le=LONGEST_DRAIN_S)] | None = None
    """Seconds that open calls get to end; 0 cuts them off, `null` is `drain_timeout`."""
    dry_run: bool = False
    """Only say what would happen."""


class EngineApi:
    def __init__(self, restarter: EngineRestarter) -> None:
        self._restarter = restarter

    def routes(self) -> list[Route]:
        return [
            Endpoint(
                "/v1/engine/restart",
                self.restart,
                method="POST",
                summary="Restart the engine; values that need a restart take effect.",
                body=_RestartBody,
                answer=RestartPlan,
                changes=True,
                errors=("engine_busy", "document_rejected"),
            )
        ]

    async def restart(self, request: Request) -> Response:
        """Answers when the restart has begun; the status document has the rest."""
        body = await parse_body(request, _RestartBody)
        actor = recorded_actor(request.scope, body.actor)
        try:
            if body.dry_run:
                plan = self._restarter.plan_restart(body.drain_s)
            else:
                plan = self._restarter.restart(body.drain_s, actor=actor)
        except EngineBusyError as error:
            raise ApiError(409, "engine_busy", str(error)) from None
        except ConfigError as error:
            raise ApiError(422, "document_rejected", error.render()) from None
        return JSONResponse(jsonable(plan))
