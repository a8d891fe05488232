"""Where a node's control API is: a Unix socket, or a URL of one that was forwarded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hisparsed.tui.errors import ViewError

SOCKET_ENV = "HISPARSED_SOCKET"
DEFAULT_SOCKET = "/run/hisparsed/control.sock"
_ADDRESSES = ("/", "./", "../", "unix:", "http://", "https://")
_BASE_OF_SOCKET = "http://hisparsed"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """``socket`` is ``None`` for a URL. ``label`` tells nodes apart on the screen."""

    label: str
    base_url: str
    socket: Path | None

    def __str__(self) -> str:
        return self.base_url if self.socket is None else str(self.socket)


def parse_address(text: str) -> NodeAddress:
    """From a path, ``unix:PATH`` or ``http://HOST:PORT``, after ``NAME=`` if a name is wanted.

    Raises ``ViewError``.
    """
    name, rest = _named(text)
    if not rest:
        raise ViewError(f'--node: "{text}" names no socket and no URL')
    if rest.startswith(("http://", "https://")):
        parts = urlsplit(rest)
        if not parts.hostname:
            raise ViewError(f'--node: "{text}" has no host; write http://HOST:PORT')
        return NodeAddress(name or parts.netloc, rest.rstrip("/"), None)
    if "://" in rest:
        scheme = rest.partition(":")[0]
        raise ViewError(f'--node: "{scheme}" is not spoken here; write http://HOST:PORT or a path')
    path = Path(rest.removeprefix("unix:"))
    return NodeAddress(name or _label(path), _BASE_OF_SOCKET, path)


def _named(text: str) -> tuple[str, str]:
    """Name and address. A name may hold a slash, as in ``rack-1/node-7=/run/a.sock``; what begins
    as an address, or goes on as none, is a path or URL with "=" in it."""
    name, equals, rest = text.partition("=")
    if not equals or "://" in name or name.startswith(_ADDRESSES):
        return "", text
    if ("/" in name or ":" in name) and not rest.startswith(_ADDRESSES):
        return "", text
    return name, rest


def default_address() -> NodeAddress:
    """What ``HISPARSED_SOCKET`` names, else the installed daemon's socket."""
    return parse_address(os.environ.get(SOCKET_ENV) or DEFAULT_SOCKET)


def _label(path: Path) -> str:
    """The folder tells sockets apart better than their usual name does."""
    if path.name == "control.sock" and path.parent.name:
        return path.parent.name
    return path.stem or str(path)
