"""`hisparsed canary`: whether the node still answers its own request as at its start.

Exit code 0 when it does or has not been asked yet, 1 after another answer, 2 when no daemon
answered.
"""

import shutil

import typer

from hisparsed.cli.options import JsonOption, SocketOption

EXIT_MISMATCH = 1
_ROUND_WITHIN_S = 900.0


def canary(
    now: bool = typer.Option(False, "--now", help="Ask now, and wait for the answers."),
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Show the canary: the node's own request whose answer must never change."""
    from hisparsed.cli.options import actor
    from hisparsed.control.canary_text import canary_page
    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.status import CanaryState, CanaryStatus

    with ControlClient(socket or DEFAULT_SOCKET, timeout_s=_ROUND_WITHIN_S) as client:
        if now:
            answer = client.post("/v1/canary/run", {"actor": actor()})
        else:
            answer = client.get("/v1/canary")
    status = CanaryStatus.model_validate(answer)
    if as_json:
        typer.echo(status.model_dump_json(indent=2))
    else:
        width = shutil.get_terminal_size().columns
        typer.echo(canary_page(status, width=width), nl=False)
    if status.state is CanaryState.MISMATCH:
        raise typer.Exit(EXIT_MISMATCH)
