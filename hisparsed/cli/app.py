"""The `hisparsed` command line: names the commands, loads the one asked for, ends cleanly.

Kept free of heavy imports so that `--help` answers at once. The work of the commands is in other
modules.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hisparsed.engine.garbage import collect_rarely, is_spawned
from hisparsed.errors import EXIT_USER_ERROR, UserError

if is_spawned():
    # A process of the engine, which multiprocessing lets import this first; vLLM comes next.
    collect_rarely()


@dataclass(frozen=True)
class LazyCommand:
    """A command that is imported when it is called; ``help`` is its line in `--help`.

    ``function`` names a function, or a ``typer.Typer`` with sub-commands.
    """

    module: str
    function: str
    help: str


COMMANDS = {
    "serve": LazyCommand("hisparsed.cli.node", "serve", "Run the node."),
    "demo": LazyCommand(
        "hisparsed.cli.traffic",
        "demo",
        "Show the node at work: reference node, real trace, policy.",
    ),
    "status": LazyCommand("hisparsed.cli.node", "status", "Show the state of a running node."),
    "top": LazyCommand(
        "hisparsed.cli.node", "top", "Watch one node or several, and change the policy."
    ),
    "explain": LazyCommand(
        "hisparsed.cli.node", "explain", "Explain why the node moved memory, or did not."
    ),
    "policy": LazyCommand(
        "hisparsed.cli.policy", "app", "Check, show, compare, reload and change the policy."
    ),
    "freeze": LazyCommand(
        "hisparsed.cli.policy", "freeze", "Freeze levers: keep them where they are."
    ),
    "thaw": LazyCommand("hisparsed.cli.policy", "thaw", "Let frozen levers move again."),
    "mode": LazyCommand(
        "hisparsed.cli.policy", "mode", "Set a more cautious mode for levers, or undo that."
    ),
    "canary": LazyCommand(
        "hisparsed.cli.engine", "canary", "Check that the node still answers as it did at start."
    ),
    "engine": LazyCommand(
        "hisparsed.cli.engine", "engine_app", "Show the state of the engine, and restart it."
    ),
    "plan": LazyCommand(
        "hisparsed.cli.plan", "plan", "Compute what fits on a node, without the node."
    ),
    "simulate": LazyCommand(
        "hisparsed.cli.plan", "simulate", "Try policies on a simulated node, in virtual time."
    ),
    "doctor": LazyCommand(
        "hisparsed.cli.operations", "doctor", "Check the machine before a node starts on it."
    ),
    "install": LazyCommand(
        "hisparsed.cli.operations", "install", "Install the systemd service and its files."
    ),
    "replay": LazyCommand(
        "hisparsed.cli.traffic", "replay", "Replay a recorded trace against an OpenAI endpoint."
    ),
    "soak": LazyCommand(
        "hisparsed.cli.traffic", "soak", "Move all levers at random and check the answers."
    ),
}


class LazyGroup(TyperGroup):
    """Lists all of ``COMMANDS`` by name and help, imports only the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, lazy in COMMANDS.items():
            self.commands[name] = TyperCommand(name, callback=None, help=lazy.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = load_command(name)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import the command's module and make a command of its function, or of its sub-commands."""
    lazy = COMMANDS[name]
    function = getattr(importlib.import_module(lazy.module), lazy.function)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from hisparsed import __version__
        from hisparsed.engine.compat.versions import installed_vllm, supported_text

        found = installed_vllm() or "not installed"
        typer.echo(f"hisparsed {__version__}")
        typer.echo(f"vLLM {found}; tested with {supported_text()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and which vLLM it is tested with.",
        ),
    ] = False,
) -> None:
    """Run one LLM-serving GPU node and move its KV memory live, by policy."""


def main() -> None:
    """The console script. An error that an operator can fix ends with one message and its exit
    code."""
    try:
        app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:
        from hisparsed.policy.problems import ConfigError

        if not isinstance(error, ConfigError):
            raise
        _fail(error.render(), EXIT_USER_ERROR)


def _fail(message: str, code: int) -> None:
    from hisparsed.cli.options import tell

    sys.exit(tell(message, code))
