"""What all routes of the control API share: reading what is asked, and answering errors."""

from __future__ import annotations

import json
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hisparsed.control.actions import StaleGenerationError
from hisparsed.control.api_errors import ApiError, error_response

__all__ = ["ERROR_HANDLERS", "ActorBody", "ApiError", "parse_body", "parse_query"]

M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 2**20
"""Policy documents are the longest bodies, and a thousandth of it."""


class ActorBody(BaseModel):
    """What every change is sent with."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    actor: str = Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")
    """Who asks; kept in the journal."""


def parse_query(request: Request, model: type[M]) -> M:
    """The query as a model. Raises ``ApiError`` naming the first mistake."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise ApiError(400, "bad_query", _first_problem(error)) from None


async def parse_body(request: Request, model: type[M]) -> M:
    """The JSON body as a model. Raises ``ApiError`` naming the first mistake."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
            raise ApiError(413, "too_large", message)
    try:
        return model.model_validate_json(bytes(parts))
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
    return error_response(error.status, error.code, str(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_response(error.status_code, code, message)
    answer.headers.update(error.headers or {})  # which methods are allowed
    return answer


async def _answer_stale(_request: Request, error: Exception) -> Response:
    return error_response(409, "stale_generation", str(error))


async def _answer_internal(_request: Request, error: Exception) -> Response:
    """The server logs the traceback."""
    return error_response(
        500, "internal", f"{type(error).__name__}: {error}; the daemon's log has more"
    )


ERROR_HANDLERS: Final = {
    ApiError: _answer_api_error,
    HTTPException: _answer_http_error,
    StaleGenerationError: _answer_stale,
    Exception: _answer_internal,
}
"""What Starlette answers when a handler raises."""
