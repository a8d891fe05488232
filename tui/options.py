"""What `hisparsed top` was asked for, checked; nothing of it runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hisparsed.tui.address import NodeAddress, default_address, parse_address
from hisparsed.tui.errors import ViewError

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
    """Labels are what the screen tells nodes apart by, so each is there once."""
    seen: dict[str, int] = {}
    result = []
    for one in addresses:
        seen[one.label] = count = seen.get(one.label, 0) + 1
        label = one.label if count == 1 else f"{one.label}-{count}"
        result.append(NodeAddress(label, one.base_url, one.socket))
    return result
