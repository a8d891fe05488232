"""Shared by several commands: the socket option, who is asking, times on the command line."""

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

SocketOption = Annotated[
    Path | None,
    typer.Option(
        envvar="HISPARSED_SOCKET",
        help="Control socket of the daemon; /run/hisparsed/control.sock if not given.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LeversArgument = Annotated[
    list[str] | None,
    typer.Argument(help="split, multiplier, admission, watermark; all if none is named."),
]


def known_levers(levers: list[str] | None) -> None:
    """Raises ``UserError`` for a name that no lever has."""
    from hisparsed.policy.signals import Lever

    for lever in levers or ():
        one_of("LEVERS", lever, list(Lever))


def actor() -> str:
    """The actor for the journal: the user behind sudo if there is one."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # of no name: a container may run as any number
        return f"uid {os.geteuid()}"


def tell(message: str, code: int) -> int:
    """Print why a command ends, as its last line; returns ``code``."""
    print(f"hisparsed: {message}", file=sys.stderr)  # noqa: T201 (standard error is the place)
    return code


def seconds(option: str, text: str) -> float:
    """A time such as 10m. Raises ``UserError`` naming the option."""
    from hisparsed.errors import UserError
    from hisparsed.policy.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        raise UserError(f'{option}: "{text}" is not a time; write 30s, 10m or 1h30m') from None


def one_of(option: str, value: str | None, known: list[str]) -> None:
    """Raises ``UserError`` when ``value`` is given and not known."""
    from hisparsed.errors import UserError

    if value is not None and value not in known:
        raise UserError(f'{option}: "{value}" is not known; use one of {", ".join(known)}')
