"""`hisparsed doctor`: examine the machine before a node starts on it.

Exit code 0 when all is well, 1 with warnings, 2 for a document with mistakes, 3 when a node must
not start like this.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hisparsed.cli.options import JsonOption

_LONGEST_LINE = 120


def doctor(
    config: Annotated[Path, typer.Option(help="The node's document.")] = Path(
        "/etc/hisparsed/hisparsed.yaml"
    ),
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove what dead engines and daemons left.")
    ] = False,
    fatal_only: Annotated[
        bool, typer.Option("--fatal-only", help="Exit code 0 with warnings; for the service.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also list what is well.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Examine the machine before a node starts on it; starts nothing."""
    from hisparsed.config.kind import nvidia_gpus
    from hisparsed.operations.doctor import visit
    from hisparsed.operations.findings import exit_code, findings_document, findings_text

    found = visit(config, nvidia_gpus, fix=fix)
    if as_json:
        typer.echo(json.dumps(findings_document(found.findings, node=found.node), indent=2))
    else:
        width = min(_LONGEST_LINE, shutil.get_terminal_size().columns)
        text = findings_text(found.findings, node=found.node, every=every, width=width)
        typer.echo(text, nl=False)
    raise typer.Exit(exit_code(found.findings, fatal_only=fatal_only))
