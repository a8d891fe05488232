"""The control API: JSON over HTTP on the control socket, `/v1/...`, and an event stream.

Reads the board and the journal, changes through ``Operator`` only. Who may connect is the
socket's file mode, not this module's business.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.control.actions import Operator, StaleGenerationError
from hisparsed.control.board import Board
from hisparsed.control.broadcast import Broadcast
from hisparsed.control.journal import Journal
from hisparsed.control.journal_store import Query
from hisparsed.control.policy_source import PolicySource, ReloadOutcome
from hisparsed.control.records import jsonable
from hisparsed.control.status import Lifecycle
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schema import Mode

M = TypeVar("M", bound=BaseModel)

MAX_LIMIT = 1_000
_DEFAULT_LIMIT = 50


class ApiError(Exception):
    """Ends a request with ``{"error": {"code", "message"}}``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    actor: str = Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")
    """Who asks; kept in the journal."""
    expected_generation: int | None = None


class _LeverBody(_Body):
    levers: tuple[Lever, ...] = Field(default=tuple(Lever), min_length=1)
    """All of them when left out."""


class _ModeBody(_LeverBody):
    mode: Mode | None
    """``null`` goes back to what the policy document says."""


class _DecisionsQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=_DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)
    since: float | None = Field(default=None, ge=0)
    lever: Lever | None = None
    code: str | None = None
    notable: bool = False


class _EventsQuery(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=_DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)


@dataclass(frozen=True, slots=True)
class ControlApi:
    """The handlers; ``application`` makes the ASGI application of them."""

    board: Board
    operator: Operator
    source: PolicySource
    journal: Journal
    broadcast: Broadcast

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                Route("/v1/status", self.status),
                Route("/v1/decisions", self.decisions),
                Route("/v1/journal/events", self.journal_events),
                Route("/v1/events", self.events),
                Route("/v1/policy", self.policy),
                Route("/v1/policy/reload", self.reload, methods=["POST"]),
                Route("/v1/freeze", self.freeze, methods=["POST"]),
                Route("/v1/thaw", self.thaw, methods=["POST"]),
                Route("/v1/mode", self.mode, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _answer_api_error,
                HTTPException: _answer_http_error,
                StaleGenerationError: _answer_stale,
                Exception: _answer_internal,
            },
        )

    async def healthz(self, request: Request) -> Response:
        if self.board.lifecycle is Lifecycle.ENGINE_GONE:
            raise ApiError(503, "engine_gone", "the engine is gone; the daemon is stopping")
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        reason = self.board.unready()
        if reason is not None:
            raise ApiError(503, "not_ready", reason)
        return JSONResponse({"status": "ready"})

    async def status(self, request: Request) -> Response:
        return JSONResponse(jsonable(self.board.status()))

    async def decisions(self, request: Request) -> Response:
        asked = _query(request, _DecisionsQuery)
        views = await self.journal.decisions(
            Query(asked.limit, asked.since, asked.lever, asked.code, asked.notable)
        )
        return JSONResponse({"decisions": [jsonable(view) for view in views]})

    async def journal_events(self, request: Request) -> Response:
        asked = _query(request, _EventsQuery)
        views = await self.journal.events(asked.limit)
        return JSONResponse({"events": [jsonable(view) for view in views]})

    async def events(self, request: Request) -> Response:
        return StreamingResponse(
            self._stream(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def policy(self, request: Request) -> Response:
        active = self.source.active
        return JSONResponse(
            {
                "generation": active.generation,
                "content_hash": active.content_hash,
                "path": str(active.path),
                "loaded_unix_s": active.loaded_unix_s,
                "document": active.text,
                "value": jsonable(active.value),
                "last_error": self.source.last_error,
            }
        )

    async def reload(self, request: Request) -> Response:
        body = await _body(request, _Body)
        reload = self.operator.reload(
            actor=body.actor, expected_generation=body.expected_generation
        )
        if reload.outcome is ReloadOutcome.REJECTED:
            raise ApiError(422, "policy_rejected", reload.error or "")
        return JSONResponse({"outcome": reload.outcome, **self._policy_summary()})

    async def freeze(self, request: Request) -> Response:
        body = await _body(request, _LeverBody)
        self.operator.freeze(
            body.levers, actor=body.actor, expected_generation=body.expected_generation
        )
        return JSONResponse(self._policy_summary())

    async def thaw(self, request: Request) -> Response:
        body = await _body(request, _LeverBody)
        self.operator.thaw(
            body.levers, actor=body.actor, expected_generation=body.expected_generation
        )
        return JSONResponse(self._policy_summary())

    async def mode(self, request: Request) -> Response:
        body = await _body(request, _ModeBody)
        try:
            self.operator.set_mode(
                body.levers,
                body.mode,
                actor=body.actor,
                expected_generation=body.expected_generation,
            )
        except ValueError as error:
            raise ApiError(422, "mode_refused", str(error)) from None
        return JSONResponse(self._policy_summary())

    def _policy_summary(self) -> dict[str, Any]:
        policy = self.board.status().policy
        return {
            "generation": policy.generation,
            "content_hash": policy.content_hash,
            "frozen": policy.frozen,
            "overridden": policy.overridden,
        }

    async def _stream(self) -> AsyncIterator[str]:
        """The status at once, then each tick's status, notable decisions, and events."""
        with self.broadcast.listen() as messages:
            yield _frame("status", self.board.status().model_dump_json())
            async for message in messages:
                yield _frame(message.kind, message.data)


def _frame(kind: str, data: str) -> str:
    return f"event: {kind}\ndata: {data}\n\n"


def _query(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise ApiError(400, "bad_query", _first_problem(error)) from None


async def _body(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise ApiError(400, "bad_body", _first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    value = json.dumps(first["input"], default=str)[:60]
    return f"{place}: {first['msg']}, got {value}" if place else f"{first['msg']}, got {value}"


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _error(error.status, error.code, str(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _error(error.status_code, code, message)


async def _answer_stale(_request: Request, error: Exception) -> Response:
    return _error(409, "stale_generation", str(error))


async def _answer_internal(_request: Request, error: Exception) -> Response:
    """The server logs the traceback."""
    return _error(500, "internal", f"{type(error).__name__}: {error}; the daemon's log has more")


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
