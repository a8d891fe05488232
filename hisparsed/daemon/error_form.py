"""In which form a client waits for an error: each API that vLLM serves has its own.

Told from the path alone. What is said is ``refusal``'s; whether a call is refused, the gate's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from hisparsed.daemon.paths import is_below


class ErrorForm(StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    """The Messages API: errors have kinds of its own, and streams end with ``event: error``."""
    RESPONSES = "responses"
    """OpenAI's Responses API: as ``OPENAI``, but every event of a stream is typed and counted."""


_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def form_of(path: str) -> ErrorForm:
    """Of a request to ``path``."""
    if is_below(path, "/v1/messages"):
        return ErrorForm.ANTHROPIC
    if is_below(path, "/v1/responses"):
        return ErrorForm.RESPONSES
    return ErrorForm.OPENAI


def anthropic_error(status: int, message: str) -> bytes:
    """The JSON object that Anthropic's clients know; its kind follows from the HTTP status."""
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else _ANTHROPIC_KINDS[400])
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
