"""The control API as a client sees it: typed answers, and errors that say what to do.

For the command line and the terminal view. Imports nothing of the engine side but models.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from hisparsed.control.journal.records import DecisionView, EventView
from hisparsed.control.status.document import Status
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
        self._has_socket = transport is None
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
        """Newest first; ``query`` as `/v1/decisions` takes it, ``None`` omitted."""
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
        if self._has_socket:
            self._require_listener()
        try:
            response = self._http.request(method, path, **how)
        except httpx.TimeoutException:
            raise UserError(
                f"the daemon on {self._path} did not answer within {self._timeout_s:g}s; it may be "
                "starting or hanging: look at its log (journalctl -u hisparsed)"
            ) from None
        except httpx.TransportError as error:
            raise UserError(
                f"the daemon on {self._path} broke off: {error}; look at its log "
                "(journalctl -u hisparsed)"
            ) from None
        if response.is_success:
            return response.json()
        raise UserError(_refusal(response))

    def _require_listener(self) -> None:
        """Raises if no process listens: httpx hides the cause, and leaks a socket that
        failed.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(self._timeout_s)
            try:
                probe.connect(os.fspath(self._path))
            except PermissionError:
                raise UserError(
                    f"you may not use {self._path}; join its group (usually hisparsed), or use sudo"
                ) from None
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                raise UserError(
                    f"no daemon answers on {self._path}; start one with `hisparsed serve`, or name "
                    f"its socket with --socket or {SOCKET_ENV}"
                ) from None
            except OSError as error:
                raise UserError(f"{self._path} cannot be used as a socket: {error}") from None


def _refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the daemon answered {response.status_code} without saying why"
