"""The control API as a client sees it: typed answers, and errors that say what to do.

For the command line and the terminal view. Imports nothing of the engine side but models.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hisparsed.control.records import DecisionView, EventView
from hisparsed.control.status import Status
from hisparsed.errors import UserError

SOCKET_ENV = "HISPARSED_SOCKET"
DEFAULT_SOCKET = Path("/run/hisparsed/control.sock")
_TIMEOUT_S = 5.0


class ControlClient:
    """One connection. Every method raises ``UserError`` when the daemon gives no answer."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = _TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            transport=transport or httpx.HTTPTransport(uds=os.fspath(path)),
            base_url="http://hisparsed",
            timeout=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def status(self) -> Status:
        return Status.model_validate(self.get("/v1/status"))

    def decisions(self, **query: str | int | float | None) -> list[DecisionView]:
        """Newest first; ``query`` as `/v1/decisions` takes it, ``None`` left out."""
        answer = self.get("/v1/decisions", **query)
        return [DecisionView.model_validate(one) for one in answer["decisions"]]

    def journal_events(self, limit: int) -> list[EventView]:
        """Newest first."""
        answer = self.get("/v1/journal/events", limit=limit)
        return [EventView.model_validate(one) for one in answer["events"]]

    def get(self, path: str, **query: str | int | float | None) -> Any:
        """The JSON answer."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", path, params=given)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer of a change."""
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **how: Any) -> Any:
        try:
            response = self._http.request(method, path, **how)
        except httpx.TimeoutException:
            raise UserError(
                f"the daemon on {self._path} did not answer within {self._timeout_s:g}s; it may be "
                "starting or hanging: look at its log (journalctl -u hisparsed)"
            ) from None
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        if response.is_success:
            return response.json()
        raise UserError(_refusal(response))

    def _unreachable(self, error: httpx.TransportError) -> UserError:
        number = _errno(error)
        if number in (errno.EACCES, errno.EPERM):
            return UserError(
                f"you may not use {self._path}; join its group (usually hisparsed), or use sudo"
            )
        if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
            return UserError(
                f"no daemon answers on {self._path}; start one with `hisparsed serve`, or name its "
                f"socket with --socket or {SOCKET_ENV}"
            )
        return UserError(f"the daemon on {self._path} cannot be reached: {error}")


def _errno(error: BaseException | None) -> int | None:
    """The number of the system error below httpx's own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the daemon answered {response.status_code} without saying why"
