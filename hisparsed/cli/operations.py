"""`hisparsed doctor` and `hisparsed install`: examine the machine, lay out the service.

``doctor`` exits with 0 if no check failed, 1 with warnings, 2 for a wrong document, and 3 when a
node must not start. ``install`` exits with 2 when a file cannot be written.
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
        bool, typer.Option("--fix", help="Remove what dead engines and daemons left behind.")
    ] = False,
    fatal_only: Annotated[
        bool,
        typer.Option(
            "--fatal-only", help="Exit with 0 if there are only warnings; for the service."
        ),
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Also list the checks that passed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the machine before a node starts on it. Starts nothing."""
    from hisparsed.config.machine import nvidia_gpus
    from hisparsed.operations.checks import exit_code, findings_document, findings_text
    from hisparsed.operations.doctor import visit

    found = visit(config, nvidia_gpus, fix=fix)
    if as_json:
        typer.echo(json.dumps(findings_document(found.findings, node=found.node), indent=2))
    else:
        width = min(_LONGEST_LINE, shutil.get_terminal_size().columns)
        text = findings_text(found.findings, node=found.node, every=every, width=width)
        typer.echo(text, nl=False)
    raise typer.Exit(exit_code(found.findings, fatal_only=fatal_only))


def install(
    prefix: Annotated[
        Path | None,
        typer.Option(help="For packages: units go to PREFIX/lib. Without it: to /etc."),
    ] = None,
    root: Annotated[
        Path, typer.Option(help="Prefix of every path, for images and packages.")
    ] = Path("/"),
    executable: Annotated[
        Path | None,
        typer.Option(help="The hisparsed that the service runs; this one if not given."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Install the systemd service, its user, folders, configuration and dashboards."""
    from hisparsed.errors import UserError
    from hisparsed.operations.install import InstallLayout, install_files

    if prefix is not None and not prefix.is_absolute():
        raise UserError(f"--prefix: {prefix} is relative; write it from /, such as /usr")
    layout = InstallLayout(
        root=root.absolute(),
        prefix=prefix,
        executable=_program() if executable is None else executable.absolute(),
        systemd_version=_systemd_version() if root == Path("/") else None,
    )
    done = install_files(layout, dry_run=dry_run)
    if as_json:
        files = [{"path": str(one.path), "outcome": one.outcome.value} for one in done]
        typer.echo(json.dumps({"dry_run": dry_run, "files": files}, indent=2))
        return
    for one in done:
        typer.echo(f"{one.outcome.value:10} {one.path}")
    if dry_run:
        typer.echo("Nothing was written.")
    typer.echo(
        "Next: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload\n"
        "      edit /etc/hisparsed/hisparsed.yaml, then: hisparsed doctor\n"
        "      systemctl enable --now hisparsed"
    )


def _program() -> Path:
    """The script next to this interpreter: what runs this command now may be `python -m`."""
    import sys

    from hisparsed.errors import UserError

    found = Path(sys.executable).with_name("hisparsed")
    if not found.is_file():
        raise UserError(f"--executable: there is no {found}; name the program of the service")
    return found


def _systemd_version() -> int | None:
    import subprocess

    try:
        said = subprocess.run(
            ["systemctl", "--version"],  # noqa: S607 (the one on the administrator's path)
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = said.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
