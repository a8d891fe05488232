"""`hisparsed engine ...` and `hisparsed canary`: the engine's state, its restart, its canary.

``engine`` exits with 1 when a restart ended with other values or without an engine. ``canary``
exits with 1 after an answer that differs. Both exit with 2 when the daemon refuses or does not
answer.
"""

import json
import shutil
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparsed.cli.options import JsonOption, SocketOption

if TYPE_CHECKING:
    from hisparsed.control.api.client import ControlClient
    from hisparsed.control.status.document import EngineStatus


EXIT_NOT_AS_ASKED = 1
_LOOK_EVERY_S = 0.5

engine_app = typer.Typer(
    name="engine",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Show the state of the engine, and restart it.",
)


@engine_app.command()
def show(as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Show the engine's state, its last end, and quarantined values."""
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        life = _life(client)
    if as_json:
        typer.echo(life.model_dump_json(indent=2))
        return
    from hisparsed.control.text.status import engine_lines, hanging

    typer.echo(hanging(engine_lines(life), shutil.get_terminal_size().columns), nl=False)


@engine_app.command()
def restart(
    drain: Annotated[
        str | None, typer.Option(help="Time for open calls to end; drain_timeout if not given.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="End open calls at once.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the engine serves again.")] = True,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Restart the engine, with the values that wait for a restart."""
    from hisparsed.cli.options import actor, seconds
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.errors import UserError

    if now and drain is not None:
        raise UserError("--now: cannot be combined with --drain; give one of them")
    drain_s = 0.0 if now else None if drain is None else seconds("--drain", drain)
    body: dict[str, Any] = {"actor": actor(), "drain_s": drain_s}
    with ControlClient(socket or DEFAULT_SOCKET) as client:
        plan = client.post("/v1/engine/restart", {**body, "dry_run": True})
        if not yes:
            typer.echo(plan["sentence"])
            typer.confirm("Restart the engine?", abort=True)
        before = _life(client).restarts_total
        plan = client.post("/v1/engine/restart", body)
        life = _until_settled(client, before) if wait else _life(client)
    reached = not wait or (life.state == "serving" and not life.quarantined)
    if as_json:
        typer.echo(json.dumps({"plan": plan, "engine": life.model_dump(mode="json")}, indent=2))
    else:
        typer.echo(_ending(life, plan["sentence"]))
    if not reached:
        raise typer.Exit(EXIT_NOT_AS_ASKED)


def _life(client: "ControlClient") -> "EngineStatus":
    from hisparsed.errors import UserError

    life = client.status().engine
    if life is None:
        raise UserError("this daemon does not supervise its engine; restart the daemon instead")
    return life


def _until_settled(client: "ControlClient", restarts_before: int) -> "EngineStatus":
    """Follows the restart and reports each step, until another engine serves or none will."""
    said = ""
    while True:
        life = _life(client)
        if life.state in ("failed", "stopped"):
            return life
        if life.state == "serving" and life.restarts_total > restarts_before:
            return life
        if life.state != said:
            said = life.state
            typer.echo(life.sentence, err=True)
        time.sleep(_LOOK_EVERY_S)


def _ending(life: "EngineStatus", begun: str) -> str:
    if life.quarantined is not None:
        return f"Quarantined, the last good values serve: {life.quarantined.error}"
    return begun if life.state == "draining" else life.sentence


EXIT_MISMATCH = 1
_ROUND_WITHIN_S = 900.0


def canary(
    now: bool = typer.Option(False, "--now", help="Ask now, and wait for the answers."),
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Show the canary: a request of the node itself whose answer must never change."""
    from hisparsed.cli.options import actor
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.status.document import CanaryState, CanaryStatus
    from hisparsed.control.text.status import canary_page

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
