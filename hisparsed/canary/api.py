"""The canary's routes on the control socket: show its state, and run a round now."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hisparsed.canary.round import Trigger
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.api.endpoint import ActorBody, Endpoint, parse_body
from hisparsed.control.api.errors import ApiError
from hisparsed.control.api.socket import recorded_actor
from hisparsed.control.journal.records import jsonable
from hisparsed.control.status.document import CanaryStatus


class CanaryApi:
    """``watch`` gives the canary of the engine that serves; ``None`` while none does."""

    def __init__(self, watch: Callable[[], CanaryWatch | None]) -> None:
        self._watch = watch

    def routes(self) -> list[Route]:
        return [
            Endpoint(
                "/v1/canary",
                self.look,
                summary="The canary: state, cost and the last round.",
                answer=CanaryStatus,
                errors=("not_ready",),
            ),
            Endpoint(
                "/v1/canary/run",
                self.run,
                method="POST",
                summary="Run a canary round now; the response follows the round.",
                body=ActorBody,
                answer=CanaryStatus,
                changes=True,
                errors=("not_ready",),
            ),
        ]

    async def look(self, request: Request) -> Response:
        return JSONResponse(jsonable(self._serving().status()))

    async def run(self, request: Request) -> Response:
        """Answers when the round has ended."""
        body = await parse_body(request, ActorBody)
        watch = self._serving()
        actor = recorded_actor(request.scope, body.actor)
        try:
            await watch.run(Trigger.OPERATOR, actor=actor)
        except RuntimeError as error:
            raise ApiError(503, "not_ready", str(error)) from None
        return JSONResponse(jsonable(watch.status()))

    def _serving(self) -> CanaryWatch:
        watch = self._watch()
        if watch is None:
            raise ApiError(503, "not_ready", "the engine is starting; the canary follows")
        return watch
