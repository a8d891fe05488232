"""The options of `hisparsed top`, checked: nodes, theme, journal.

A node is a Unix socket, or the URL of one that was forwarded. ``ViewError`` is an error that an
operator can fix. Nothing runs here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit


class ViewError(Exception):
    """The message names the place, the value and the expected value."""


SOCKET_ENV = "HISPARSED_SOCKET"
DEFAULT_SOCKET = "/run/hisparsed/control.sock"
_ADDRESSES = ("/", "./", "../", "unix:", "http://", "https://")
_BASE_OF_SOCKET = "http://hisparsed"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """``socket`` is ``None`` for a URL. ``label`` distinguishes nodes; a node that was not
    ``named``
    shows the name that it gives itself."""

    label: str
    base_url: str
    socket: Path | None
    named: bool = False

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
        return NodeAddress(name or parts.netloc, rest.rstrip("/"), None, bool(name))
    if "://" in rest:
        scheme = rest.partition(":")[0]
        raise ViewError(f'--node: "{scheme}" is not supported; write http://HOST:PORT or a path')
    path = Path(rest.removeprefix("unix:"))
    return NodeAddress(name or _label(path), _BASE_OF_SOCKET, path, bool(name))


def _named(text: str) -> tuple[str, str]:
    """Name and address. A name may hold a slash, as in ``rack-1/node-7=/run/a.sock``; text that
    begins like an address, or does not continue like one, is a path or URL with "=" in it."""
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
    """Of a node that has not said its name: the folder distinguishes sockets better than their
    usual name does."""
    if path.name == "control.sock" and path.parent.name:
        return path.parent.name
    return path.stem or str(path)


THEMES = ("dark", "light", "colour-blind")


@dataclass(frozen=True, slots=True)
class TopOptions:
    addresses: tuple[NodeAddress, ...]
    journal: Path | None = None
    readonly: bool = False
    theme: str = THEMES[0]
    ascii_only: bool = False
    no_color: bool = False


def make_options(
    nodes: list[str],
    *,
    socket: Path | None,
    journal: Path | None,
    readonly: bool,
    theme: str,
    ascii_only: bool,
    environment: Mapping[str, str] = os.environ,
    encoding: str | None = None,
) -> TopOptions:
    """Raises ``ViewError``. ``encoding`` is the terminal's; what it cannot show is not used."""
    if theme not in THEMES:
        raise ViewError(f'--theme: "{theme}" is not known; use one of {", ".join(THEMES)}')
    if journal is not None and (nodes or socket is not None):
        raise ViewError("--journal shows a recorded node; leave --node and --socket out")
    if nodes and socket is not None:
        raise ViewError("--socket names one node and --node several; use only one of them")
    addresses = [parse_address(one) for one in nodes]
    if not addresses:
        addresses = [parse_address(str(socket)) if socket is not None else default_address()]
    terminal = encoding or getattr(sys.stdout, "encoding", None) or "ascii"
    return TopOptions(
        addresses=tuple(_labelled_apart(addresses)),
        journal=journal,
        readonly=readonly,
        theme=theme,
        ascii_only=ascii_only or "utf" not in terminal.lower(),
        no_color=bool(environment.get("NO_COLOR")),
    )


def _labelled_apart(addresses: list[NodeAddress]) -> list[NodeAddress]:
    """The view distinguishes nodes by label, so each label exists once."""
    seen: dict[str, int] = {}
    result = []
    for one in addresses:
        seen[one.label] = count = seen.get(one.label, 0) + 1
        label = one.label if count == 1 else f"{one.label}-{count}"
        result.append(replace(one, label=label))
    return result
