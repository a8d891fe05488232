"""`hisparsed status`: one look at a running node, as a page or as JSON.

Exit code 0 when a daemon answered, 2 when none did.
"""

import typer

from hisparsed.cli.options import JsonOption, SocketOption


def status(as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Show the state of a running node."""
    import shutil

    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.status_text import status_page

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        document = client.status()
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        typer.echo(status_page(document, width=shutil.get_terminal_size().columns), nl=False)
