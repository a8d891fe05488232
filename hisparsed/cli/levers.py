"""`hisparsed freeze`, `thaw` and `mode`: hold levers still, or make them more cautious.

Exit code 0 when the daemon did it, 2 when it refused or does not answer.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hisparsed.cli.options import JsonOption, SocketOption

_Levers = Annotated[
    list[str] | None,
    typer.Argument(help="split, multiplier, admission, watermark; all if none is named."),
]


def freeze(
    levers: _Levers = None, as_json: JsonOption = False, socket: SocketOption = None
) -> None:
    """Keep levers where they are until they are thawed or the daemon ends."""
    answer = _post("/v1/freeze", levers, socket)
    _print(answer, as_json)


def thaw(levers: _Levers = None, as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Let frozen levers move again."""
    answer = _post("/v1/thaw", levers, socket)
    _print(answer, as_json)


def mode(
    mode: Annotated[str, typer.Argument(help="act, advise, off; or policy to go back to it.")],
    levers: _Levers = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Set the mode of levers; it can only be more cautious than the policy says."""
    from hisparsed.cli.options import one_of
    from hisparsed.policy.schema import Mode

    one_of("MODE", mode, [*Mode, "policy"])
    answer = _post("/v1/mode", levers, socket, mode=None if mode == "policy" else mode)
    _print(answer, as_json)


def _post(path: str, levers: list[str] | None, socket: Path | None, **more: Any) -> Any:
    from hisparsed.cli.options import actor, one_of
    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.policy.reasons import Lever

    for lever in levers or ():
        one_of("LEVERS", lever, list(Lever))
    body = {"actor": actor(), **more, **({"levers": levers} if levers else {})}
    with ControlClient(socket or DEFAULT_SOCKET) as client:
        return client.post(path, body)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    from hisparsed.policy.reasons import Lever

    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    modes = ", ".join(
        f"{lever.value} {answer['overridden'][lever.value]}"
        for lever in Lever
        if lever.value in answer["overridden"]
    )
    typer.echo(f"frozen      {', '.join(answer['frozen']) or 'nothing'}")
    typer.echo(f"modes set   {modes or 'none'}")
