"""`hisparsed install`: lay out the systemd service and its files, and say what to run next.

Exit code 0 when all is in place, 2 where a file cannot be written.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from hisparsed.cli.options import JsonOption


def install(
    prefix: Annotated[
        Path | None,
        typer.Option(help="For packages: units go to PREFIX/lib. Without it: to /etc."),
    ] = None,
    root: Annotated[
        Path, typer.Option(help="Put before every path, for images and packages.")
    ] = Path("/"),
    executable: Annotated[
        Path | None,
        typer.Option(help="The hisparsed that the service runs; this one if not given."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Lay out the systemd service, its user, folders, configuration and dashboards."""
    from hisparsed.errors import UserError
    from hisparsed.operations.install import Layout
    from hisparsed.operations.install import install as lay_out

    if prefix is not None and not prefix.is_absolute():
        raise UserError(f"--prefix: {prefix} is relative; write it from /, such as /usr")
    layout = Layout(
        root=root.absolute(),
        prefix=prefix,
        executable=_program() if executable is None else executable.absolute(),
        systemd_version=_systemd_version() if root == Path("/") else None,
    )
    done = lay_out(layout, dry_run=dry_run)
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
    """The script beside this interpreter: what runs this command now may be `python -m`."""
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
