"""The doctor's routes on the control socket: what it found, and look again."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hisparsed.control.api_base import ActorBody, ApiError, parse_body
from hisparsed.control.api_endpoint import Endpoint
from hisparsed.control.doctor_watch import DoctorBusyError, DoctorWatch
from hisparsed.control.peer import recorded_actor
from hisparsed.control.records import jsonable
from hisparsed.control.status_doctor import DoctorStatus


class DoctorApi:
    def __init__(self, watch: DoctorWatch) -> None:
        self._watch = watch

    def routes(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/doctor",
                self.findings,
                summary="What the doctor found: before the start, and when it last looked.",
                answer=DoctorStatus,
            ),
            Endpoint(
                "/v1/doctor/run",
                self.run,
                method="POST",
                summary="Look again now; answers when the look has ended.",
                answer=DoctorStatus,
                body=ActorBody,
                changes=True,
                errors=("not_ready",),
            ),
        ]

    async def findings(self, request: Request) -> Response:
        return JSONResponse(jsonable(self._watch.status()))

    async def run(self, request: Request) -> Response:
        body = await parse_body(request, ActorBody)
        actor = recorded_actor(request.scope, body.actor)
        try:
            return JSONResponse(jsonable(await self._watch.look(actor=actor)))
        except DoctorBusyError as error:
            raise ApiError(503, "not_ready", str(error)) from None
