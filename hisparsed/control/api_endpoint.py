"""A route of the control API together with what the OpenAPI document says of it.

So that the two cannot differ: a route is served as soon as it is described. Not for what the
handlers do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]
Method = Literal["GET", "POST"]

JSON: Final = "application/json"


class Endpoint(Route):
    """``answer`` is what 200 carries: anything that pydantic can describe.

    ``query`` and ``body`` are the models that the handler reads; ``errors`` are codes of
    ``api_errors.ERRORS``, without those that every route or every change may answer.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        summary: str,
        answer: Any,
        method: Method = "GET",
        query: type[BaseModel] | None = None,
        body: type[BaseModel] | None = None,
        changes: bool = False,
        errors: tuple[str, ...] = (),
        media_type: str = JSON,
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.summary = summary
        self.answer = answer
        self.method: Method = method
        self.query = query
        self.body = body
        self.changes = changes
        """Whether somebody must be allowed to change the node to ask for it."""
        self.errors = errors
        self.media_type = media_type
