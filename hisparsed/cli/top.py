"""`hisparsed top`: the operator's view of one node or several, live or from a journal.

Exit code 0; with `--once` and `--json` 1 when some node did not answer and 2 when none did.
"""

from pathlib import Path
from typing import Annotated

import typer


def top(
    node: Annotated[
        list[str] | None,
        typer.Option(help="Socket or URL of a node; NAME=... names it. Several make a fleet."),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(help="Control socket of the one node; HISPARSED_SOCKET if not given."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Show a recorded journal.sqlite instead.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one page as text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one status as JSON.")] = False,
    readonly: Annotated[bool, typer.Option("--readonly", help="Refuse every change.")] = False,
    theme: Annotated[str, typer.Option(help="dark, light or colour-blind.")] = "dark",
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Only ASCII characters; NO_COLOR leaves colour out.")
    ] = False,
) -> None:
    """Watch a node, and steer its policy."""
    from hisparsed.errors import UserError
    from hisparsed.tui.errors import ViewError
    from hisparsed.tui.options import make_options

    if journal is not None and (once or as_json):
        what = "--once" if once else "--json"
        raise UserError(
            f"{what}: prints a live node, not --journal; see `hisparsed explain --journal`"
        )
    try:
        options = make_options(
            node or [],
            socket=socket,
            journal=journal,
            readonly=readonly,
            theme=theme,
            ascii_only=ascii_only,
        )
        if once or as_json:
            from hisparsed.tui.once import print_once

            code = print_once(options, as_json=as_json)
        else:
            from hisparsed.tui.run import run_app

            code = run_app(options)
    except ViewError as error:
        raise UserError(str(error)) from None
    if code:
        raise typer.Exit(code)
