"""The control API as an application: `/v1/...`, health, status, decisions, and the event stream.

Reads the current status and the journal. ``policy`` has the routes that change something, ``views``
those for a closer look. The socket's file mode says who may connect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.control.api.answers import Decisions, Events, Liveness, Readiness
from hisparsed.control.api.endpoint import Endpoint, openapi_document, parse_query
from hisparsed.control.api.errors import ERROR_HANDLERS, ApiError
from hisparsed.control.api.policy import PolicyApi
from hisparsed.control.events import Broadcast, Message
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import jsonable
from hisparsed.control.journal.store import Query
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.operator import Operator
from hisparsed.control.status.current import CurrentStatus
from hisparsed.control.status.document import Lifecycle, Status
from hisparsed.policy.signals import Lever

MAX_LIMIT = 1_000
_DEFAULT_LIMIT = 50


class _DecisionsQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    limit: int = Field(default=_DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)
    since: float | None = Field(default=None, ge=0)
    """Unix seconds."""
    lever: Lever | None = None
    code: str | None = None
    """A reason code, such as `OffloadShortOfReach`."""
    notable: bool = False
    """Only decisions that act, or hold for another reason than in the tick before."""


class _EventsQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=_DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)


@dataclass(frozen=True, slots=True)
class ControlApi:
    """The handlers; ``application`` makes the ASGI application of them."""

    current: CurrentStatus
    operator: Operator
    source: PolicySource
    journal: Journal
    broadcast: Broadcast
    more_routes: Sequence[Route] = ()

    def application(self) -> Starlette:
        routes = [
            *self._routes(),
            *PolicyApi(self.current, self.operator, self.source).routes(),
            *self.more_routes,
        ]
        endpoints = [route for route in routes if isinstance(route, Endpoint)]

        @cache
        def document() -> dict[str, Any]:
            return openapi_document(endpoints, self.current.status().node.version)

        async def describe(_: Request) -> Response:
            return JSONResponse(document())

        endpoints.append(
            Endpoint(
                "/v1/openapi.json",
                describe,
                summary="This document.",
                answer=dict[str, Any],
            )
        )
        return Starlette(routes=[*routes, endpoints[-1]], exception_handlers=ERROR_HANDLERS)

    def _routes(self) -> list[Route]:
        return [
            Endpoint(
                "/healthz",
                self.healthz,
                summary="Whether the daemon is alive.",
                answer=Liveness,
                errors=("engine_gone",),
            ),
            Endpoint(
                "/readyz",
                self.readyz,
                summary="Whether the node should get requests.",
                answer=Readiness,
                errors=("not_ready",),
            ),
            Endpoint("/v1/status", self.status, summary="The status document.", answer=Status),
            Endpoint(
                "/v1/decisions",
                self.decisions,
                summary="Decisions, one per lever and tick.",
                query=_DecisionsQuery,
                answer=Decisions,
            ),
            Endpoint(
                "/v1/journal/events",
                self.journal_events,
                summary="Events: reloads, freezes, starts, failures.",
                query=_EventsQuery,
                answer=Events,
            ),
            Endpoint(
                "/v1/events",
                self.events,
                summary="Server-sent events: `status`, `decisions`, `event` and `logs`.",
                answer=str,
                media_type="text/event-stream",
            ),
        ]

    async def healthz(self, request: Request) -> Response:
        if self.current.lifecycle is Lifecycle.ENGINE_GONE:
            raise ApiError(503, "engine_gone", "the engine is gone; the daemon is stopping")
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        reason = self.current.unready()
        if reason is not None:
            raise ApiError(503, "not_ready", reason)
        return JSONResponse({"status": "ready"})

    async def status(self, request: Request) -> Response:
        return JSONResponse(jsonable(self.current.status()))

    async def decisions(self, request: Request) -> Response:
        asked = parse_query(request, _DecisionsQuery)
        views = await self.journal.decisions(
            Query(asked.limit, asked.since, asked.lever, asked.code, asked.notable)
        )
        return JSONResponse({"decisions": [jsonable(view) for view in views]})

    async def journal_events(self, request: Request) -> Response:
        asked = parse_query(request, _EventsQuery)
        views = await self.journal.events(asked.limit)
        return JSONResponse({"events": [jsonable(view) for view in views]})

    async def events(self, request: Request) -> Response:
        return StreamingResponse(
            self._stream(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def _stream(self) -> AsyncIterator[str]:
        """The status at once, then each tick's status, notable decisions, and events.

        The status also where nothing else comes for a while: an engine that starts, or a slow
        tick, must not look like a daemon that hangs.
        """
        with self.broadcast.listen(keepalive=self._status) as messages:
            yield _frame(self._status())
            async for message in messages:
                yield _frame(message)

    def _status(self) -> Message:
        return Message("status", self.current.status().model_dump_json())


def _frame(message: Message) -> str:
    return f"event: {message.kind}\ndata: {message.data}\n\n"
