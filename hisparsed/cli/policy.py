"""`hisparsed policy ...`, `freeze`, `thaw` and `mode`: check, show and change the policy.

Exit code 2 for a policy that is invalid, for a refusal, and when no daemon answers. Imports beyond
typer wait until a command runs.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hisparsed.cli.options import JsonOption, LeversArgument, SocketOption

app = typer.Typer(
    name="policy",
    help="Check, show, compare, reload and change the policy.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
EXIT_MISTAKES = 2

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A policy document.")]


@app.command()
def check(
    file: _File,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask the daemon for this node's sizes.")
    ] = False,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Check a policy document. If a daemon answers, also check it against its node.

    Without a daemon the exit code depends on the document alone.
    """
    from hisparsed.control.text.policy import judgement_text
    from hisparsed.policy.effective import load_policy
    from hisparsed.policy.problems import ConfigError

    node, why = None, "--offline"
    try:
        text = load_policy(file).loaded.text
        answer: dict[str, Any] = {"ok": True, "problems": [], "changes": []}
        if not offline:
            node, answer, why = _judge(socket, text, answer)
    except ConfigError as error:
        if not as_json:
            raise
        answer = {"ok": False, "problems": _problems(error), "changes": []}
    if as_json:
        asked = {"file": str(file), "node": node, "not_compared": None if node else why}
        typer.echo(json.dumps({**asked, **answer}, indent=2))
    else:
        typer.echo(judgement_text(str(file), answer, node=node, not_compared=why), nl=False)
    if not answer["ok"]:
        raise typer.Exit(EXIT_MISTAKES)


@app.command()
def show(
    every: Annotated[
        bool, typer.Option("--all", help="Also show keys that have their default.")
    ] = False,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Show the policy in force, where each value comes from, and what needs a restart."""
    import time

    from hisparsed.control.text.policy import policy_text

    answer = _get(socket, "/v1/policy")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        typer.echo(policy_text(answer, now_unix_s=time.time(), every=every), nl=False)


@app.command()
def diff(file: _File, as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Show what a document would change in the policy in force."""
    from hisparsed.control.text.policy import changes_text, judgement_text, left_out_text
    from hisparsed.policy.effective import load_policy

    text = load_policy(file).loaded.text
    answer = _post(socket, "/v1/policy/diff", {"document": text})
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    elif answer["ok"]:
        typer.echo(changes_text(answer["changes"]), nl=False)
        if answer.get("left_out"):
            typer.echo(left_out_text(answer["left_out"]))
    else:
        typer.echo(judgement_text(str(file), answer, node="the daemon", not_compared=""), nl=False)
    if not answer["ok"]:
        raise typer.Exit(EXIT_MISTAKES)


@app.command()
def reload(as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Read the node's policy document again. An invalid one is rejected, and the old one stays."""
    from hisparsed.cli.options import actor

    answer = _post(socket, "/v1/policy/reload", {"actor": actor()})
    words = {"loaded": "Loaded", "unchanged": "The document has not changed"}
    said = f"{words[answer['outcome']]}: generation {answer['generation']}"
    _print(answer, f"{said} ({answer['content_hash'][:12]}).", as_json)


@app.command("set")
def set_value(
    key: Annotated[str, typer.Argument(help="A key with dots, such as hot.max.")],
    value: Annotated[str, typer.Argument(help="As in the document, such as 10%.")],
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, e.g. 1h; required without --until-unset.")
    ] = None,
    until_unset: Annotated[
        bool,
        typer.Option("--until-unset", help="With no end. For permanent values, edit the document."),
    ] = False,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Override a value of the document for a time. Survives reloads and restarts."""
    from hisparsed.cli.options import actor, seconds
    from hisparsed.control.text.status import clock_text
    from hisparsed.errors import UserError
    from hisparsed.policy.schedules import LONGEST_S
    from hisparsed.policy.units import format_duration

    if (for_ is None) is not until_unset:
        raise UserError("say how long: --for 1h, or --until-unset; one of the two")
    for_s = None if for_ is None else seconds("--for", for_)
    if for_s is not None and not 0 < for_s <= LONGEST_S:
        raise UserError(
            f'--for: "{for_}" must be more than 0s and at most {format_duration(LONGEST_S)}; '
            "--until-unset sets no end"
        )
    body = {"actor": actor(), "key": key, "value": value, "for_s": for_s}
    answer = _post(socket, "/v1/policy/set", body)
    expires = answer["override"]["expires_unix_s"]
    end = "it is unset" if expires is None else clock_text(expires)
    text = f"{key} = {value} until {end}; generation {answer['generation']}."
    for one in answer.get("pending_restart", ()):  # an older daemon does not say
        text += f"\n{one['key']} runs as {one['running']}; {one['wanted']} needs a restart."
    if answer["not_kept"] is not None:
        text += f"\nIt will not survive a restart: {answer['not_kept']}."
    _print(answer, text, as_json)


@app.command()
def unset(
    key: Annotated[str, typer.Argument(help="A key that was set.")],
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Remove the override of a key. The document, or a schedule, applies again."""
    from hisparsed.cli.options import actor

    answer = _post(socket, "/v1/policy/unset", {"actor": actor(), "key": key})
    _print(answer, f"{key} is no longer set; generation {answer['generation']}.", as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the document, for editors."""
    from hisparsed.policy.schema_docs import schema_text

    typer.echo(schema_text(), nl=False)


@app.command()
def reference() -> None:
    """Print the reference of every key, in Markdown."""
    from hisparsed.policy.schema_docs import reference_page

    typer.echo(reference_page(), nl=False)


@app.command()
def replay(
    journal: Annotated[
        Path, typer.Argument(help="A journal (journal.sqlite), or the state folder it is in.")
    ],
    policy: Annotated[Path, typer.Option(help="The policy to decide with instead.")],
    since: Annotated[str | None, typer.Option(help="Only this far back, e.g. 1h.")] = None,
    first: Annotated[int, typer.Option(min=0, help="How many differences to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Decide recorded ticks again with another policy. Shows where the decisions differ.

    The recording does not react to the other policy.
    """
    from dataclasses import asdict

    from hisparsed.cli.options import seconds
    from hisparsed.control.journal.replay import replay_journal
    from hisparsed.control.text.policy import replay_text
    from hisparsed.policy.effective import load_policy

    last_s = None if since is None else seconds("--since", since)
    result = replay_journal(journal, load_policy(policy), last_s=last_s, first=first)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        typer.echo(replay_text(result), nl=False)


def _get(socket: Path | None, path: str) -> Any:
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        return client.get(path)


def _post(socket: Path | None, path: str, body: dict[str, Any]) -> Any:
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        return client.post(path, body)


def _judge(
    socket: Path | None, text: str, alone: dict[str, Any]
) -> tuple[str | None, dict[str, Any], str]:
    """Which node judged the document, and how; ``alone`` and the reason where none did."""
    from hisparsed.control.api.client import DEFAULT_SOCKET
    from hisparsed.errors import UserError

    try:
        answer = _post(socket, "/v1/policy/check", {"document": text})
    except UserError as error:
        return None, alone, str(error)
    return str(socket or DEFAULT_SOCKET), answer, ""


def _problems(error: Any) -> list[dict[str, Any]]:
    from hisparsed.policy.problems import key_text

    return [
        {"line": one.line, "key": key_text(one.key), "message": one.words} for one in error.problems
    ]


def _print(answer: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)


def freeze(
    levers: LeversArgument = None, as_json: JsonOption = False, socket: SocketOption = None
) -> None:
    """Keep levers where they are until they are thawed or the daemon ends."""
    answer = _post_levers("/v1/freeze", levers, socket)
    _print_levers(answer, as_json)


def thaw(
    levers: LeversArgument = None, as_json: JsonOption = False, socket: SocketOption = None
) -> None:
    """Let frozen levers move again."""
    answer = _post_levers("/v1/thaw", levers, socket)
    _print_levers(answer, as_json)


def mode(
    mode: Annotated[str, typer.Argument(help="act, advise, off; or policy to go back to it.")],
    levers: LeversArgument = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Set the mode of levers. It can only be more cautious than the policy's mode."""
    from hisparsed.cli.options import one_of
    from hisparsed.policy.schema import Mode

    one_of("MODE", mode, [*Mode, "policy"])
    answer = _post_levers("/v1/mode", levers, socket, mode=None if mode == "policy" else mode)
    _print_levers(answer, as_json)


def _post_levers(path: str, levers: list[str] | None, socket: Path | None, **more: Any) -> Any:
    from hisparsed.cli.options import actor, known_levers
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient

    known_levers(levers)
    body = {"actor": actor(), **more, **({"levers": levers} if levers else {})}
    with ControlClient(socket or DEFAULT_SOCKET) as client:
        return client.post(path, body)


def _print_levers(answer: dict[str, Any], as_json: bool) -> None:
    from hisparsed.policy.signals import Lever

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
