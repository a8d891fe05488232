"""Every error of the control API: code, status, meaning, and the answers made of them.

One table serves the handlers, the OpenAPI document and the reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hisparsed.control.operator import StaleGenerationError
from hisparsed.policy.problems import printable


@dataclass(frozen=True, slots=True)
class ErrorKind:
    status: int
    meaning: str


ERRORS: Final = {
    "bad_query": ErrorKind(400, "a parameter is unknown, missing or has a wrong value"),
    "bad_body": ErrorKind(400, "the body is not valid JSON for this path"),
    "not_allowed": ErrorKind(403, "this user may look but not change anything"),
    "not_found": ErrorKind(404, "there is no such path or no such entry"),
    "method_not_allowed": ErrorKind(405, "the path does not support this method"),
    "stale_generation": ErrorKind(409, "the policy has changed since the caller read it"),
    "engine_busy": ErrorKind(409, "the engine starts, drains or is restarting already"),
    "too_large": ErrorKind(413, "the body is larger than the control API accepts"),
    "policy_rejected": ErrorKind(422, "the policy document is invalid; the old one stays"),
    "document_rejected": ErrorKind(422, "the node's document is invalid; nothing changes"),
    "value_refused": ErrorKind(422, "the value would make the policy invalid"),
    "not_set": ErrorKind(422, "no operator has set this key"),
    "mode_refused": ErrorKind(422, "the policy document is more cautious than this mode"),
    "internal": ErrorKind(500, "a bug in the daemon; its log has the traceback"),
    "engine_gone": ErrorKind(503, "the engine has died; the daemon is stopping"),
    "not_ready": ErrorKind(503, "the engine starts, drains, is busy or does not answer"),
}


class ErrorDetail(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    code: str
    """Stable; for programs."""
    message: str
    """For people."""


class ErrorBody(BaseModel):
    """The body of every answer with status 400 or more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with ``{"error": {"code", "message"}}``; ``ERRORS`` has code and status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def error_body(status: int, code: str, message: str) -> bytes:  # noqa: ARG001
    """The JSON of an error."""
    detail = ErrorDetail(code=code, message=printable(message))
    return ErrorBody(error=detail).model_dump_json().encode()


def error_response(status: int, code: str, message: str) -> Response:
    return Response(error_body(status, code, message), status, media_type="application/json")


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
"""The answer of Starlette when a handler raises."""
