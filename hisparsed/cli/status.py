"""`hisparsed status`: one look at a running node, as a page or as JSON.

Exit code 0 when a daemon answered, 2 when none did.
"""

from pathlib import Path
from typing import Annotated

import typer


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    socket: Annotated[
        Path | None,
        typer.Option(
            envvar="HISPARSED_SOCKET",
            help="Control socket of the daemon; /run/hisparsed/control.sock if not given.",
        ),
    ] = None,
) -> None:
    """Show the state of a running node."""
    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.status_text import status_page

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        document = client.status()
    typer.echo(document.model_dump_json(indent=2) if as_json else status_page(document), nl=as_json)
