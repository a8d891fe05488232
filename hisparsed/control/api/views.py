"""Read-only routes for details: requests, log lines, whole ticks, history.

Nothing here changes anything. The table of requests is expensive, so it is made when asked for, not
every tick.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hisparsed.control.api.answers import HistoryTable, LogLines, TickDocument
from hisparsed.control.api.endpoint import Endpoint, parse_query
from hisparsed.control.api.errors import ApiError
from hisparsed.control.events import Broadcast, Message
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import jsonable
from hisparsed.control.journal.store import tick_in_file, tick_in_memory
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.history import SPAN_S, History
from hisparsed.engine.messages import RequestTable
from hisparsed.logs.ring import RING_LINES, LogLine, LogRing

AskForRequests = Callable[[], Awaitable[RequestTable]]

_LOG_LINES: TypeAdapter[list[LogLine]] = TypeAdapter(list[LogLine])


class _Query(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _LogsQuery(_Query):
    limit: int = Field(default=200, ge=1, le=RING_LINES)
    level: int = Field(default=0, ge=0, le=50)
    """The least, as in Python's logging: 20 info, 30 warning, 40 error."""
    source: Literal["daemon", "engine"] | None = None


class _HistoryQuery(_Query):
    span_s: float = Field(default=SPAN_S, gt=0, le=SPAN_S)
    """Seconds up to the latest row."""


class _TickQuery(_Query):
    at: float | None = None
    """Its `at_unix_s`, for ticks of earlier runs."""


class ApiViews:
    """``engine`` returns the object that asks the engine for its requests; ``None`` while none
    serves."""

    def __init__(
        self,
        journal: Journal,
        broadcast: Broadcast,
        logs: LogRing,
        history: History,
        *,
        engine: Callable[[], AskForRequests | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self.logs = logs
        self.history = history
        self._journal = journal
        self._broadcast = broadcast

    def watch(self, outcome: TickOutcome) -> None:
        """After every tick: keep history, and send the new log lines to the listeners in one
        message."""
        self.history.watch(outcome)
        lines = self.logs.take_new()
        if lines and self._broadcast.listeners:
            self._broadcast.send(Message("logs", _LOG_LINES.dump_json(lines).decode()))

    def routes(self) -> list[Route]:
        return [
            Endpoint(
                "/v1/requests",
                self.request_table,
                summary="One line per request, running ones first. No prompt text.",
                answer=RequestTable,
                errors=("not_ready",),
            ),
            Endpoint(
                "/v1/logs",
                self.log_lines,
                summary="The latest log lines of daemon and engine.",
                query=_LogsQuery,
                answer=LogLines,
            ),
            Endpoint(
                "/v1/history",
                self.past,
                summary="Gauges and counters of the last two hours.",
                query=_HistoryQuery,
                answer=HistoryTable,
            ),
            Endpoint(
                "/v1/decisions/{sequence:serial}",
                self.tick,
                summary="One tick, complete.",
                query=_TickQuery,
                answer=TickDocument,
                errors=("not_found",),
            ),
        ]

    async def request_table(self, request: Request) -> Response:
        requests = self._engine()
        if requests is None:
            raise ApiError(503, "not_ready", "the engine is starting; it has no requests yet")
        try:
            table = await requests()
        except TimeoutError as error:
            raise ApiError(503, "not_ready", f"the engine is busy: {error}") from None
        return JSONResponse(jsonable(table))

    async def log_lines(self, request: Request) -> Response:
        asked = parse_query(request, _LogsQuery)
        lines = self.logs.lines(limit=asked.limit, level=asked.level, source=asked.source)
        return JSONResponse({"lines": [line.model_dump() for line in lines]})

    async def past(self, request: Request) -> Response:
        asked = parse_query(request, _HistoryQuery)
        return JSONResponse(self.history.document(asked.span_s))

    async def tick(self, request: Request) -> Response:
        asked = parse_query(request, _TickQuery)
        sequence: int = request.path_params["sequence"]
        found = tick_in_memory(self._journal.ticks, sequence, asked.at)
        if found is None:
            try:
                found = await asyncio.to_thread(
                    tick_in_file, self._journal.path, sequence, asked.at, run=self._journal.run
                )
            except sqlite3.Error:
                found = None
        if found is None:
            raise ApiError(404, "not_found", f"the journal holds no tick with sequence {sequence}")
        return JSONResponse(found)
