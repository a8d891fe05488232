"""`hisparsed serve`, `status`, `top` and `explain`: run a node and look at it.

``serve`` exits with 0 after a stop that was requested, 2 for wrong input, and 70 when no
engine could be started or kept running. ``status`` and ``explain`` exit with 2 when no daemon
answers. ``top --once`` and ``top --json`` exit with 1 when some node did not answer and with 2
when none did. Imports beyond typer wait until a command runs.
"""

import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from hisparsed.cli.options import JsonOption, LeversArgument, SocketOption, tell


def serve(
    config: Annotated[Path, typer.Option(help="The node's document (hisparsed.yaml).")],
    allow_untested_vllm: Annotated[
        bool,
        typer.Option(
            "--allow-untested-vllm", help="Start with a vLLM that hisparsed was not tested with."
        ),
    ] = False,
) -> None:
    """Run the node."""
    # As process 1 of a container it would not even get a signal that it has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_before_the_start)
    from hisparsed.config.machine import detect_node_kind, machine_memory_bytes, nvidia_gpus
    from hisparsed.config.node import load_node_config
    from hisparsed.control.doctor import Doctor
    from hisparsed.engine.compat.versions import OVERRIDE_ENV
    from hisparsed.errors import EXIT_USER_ERROR, UserError
    from hisparsed.node.run import run_node
    from hisparsed.node.service import configure_logging, service_manager
    from hisparsed.operations.doctor import AbsentDoctor, NodeDoctor
    from hisparsed.policy.problems import ConfigError

    if allow_untested_vllm:
        os.environ[OVERRIDE_ENV] = "1"
    # The state folder is for this user and the operators' group.
    os.umask(0o027)
    loaded = load_node_config(config, memory_bytes=machine_memory_bytes())
    configure_logging(loaded.value.log, terminal=sys.stderr.isatty())
    detected = detect_node_kind(loaded.value, nvidia_gpus)
    manager = service_manager(os.environ, pid=os.getpid(), clock=time.monotonic)
    doctor: Doctor
    try:
        doctor = NodeDoctor.before_start(loaded.value, config, detected.kind)
    except Exception as error:
        # A check that the doctor cannot run is reported, and does not prevent a start.
        doctor = AbsentDoctor(error, at_unix_s=time.time())
    try:
        code = run_node(loaded.value, detected, document=config, manager=manager, doctor=doctor)
    except UserError as error:
        code = tell(str(error), error.exit_code)
    except ConfigError as error:
        code = tell(error.render(), EXIT_USER_ERROR)
    except Exception:
        traceback.print_exc()
        code = EXIT_MISTAKE
    # Everything is closed. Leaving now skips the interpreter's tear-down, in which extension
    # modules that vLLM loads print pages of leak reports over the end of the log.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


EXIT_MISTAKE = 1
"""Of the daemon itself; the traceback is the end of the log. The service manager tries again."""


def _stop_before_the_start(*_: object) -> None:
    """Nothing is taken yet; ``run_node`` has its own handlers."""
    raise SystemExit(0)


def status(as_json: JsonOption = False, socket: SocketOption = None) -> None:
    """Show the state of a running node."""
    import shutil

    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.text.status import status_page

    with ControlClient(socket or DEFAULT_SOCKET) as client:
        document = client.status()
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        typer.echo(status_page(document, width=shutil.get_terminal_size().columns), nl=False)


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
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one page as text and exit; with --journal, at its end."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one status as JSON.")] = False,
    readonly: Annotated[bool, typer.Option("--readonly", help="Allow no changes.")] = False,
    theme: Annotated[str, typer.Option(help="dark, light or colour-blind.")] = "dark",
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Use only ASCII characters; NO_COLOR turns colour off.")
    ] = False,
) -> None:
    """Watch a node, and change its policy."""
    from hisparsed.errors import UserError
    from hisparsed.tui.options import ViewError, make_options

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
            from hisparsed.tui.app import run_app

            code = run_app(options)
    except ViewError as error:
        raise UserError(str(error)) from None
    if code:
        raise typer.Exit(code)


_LONGEST_LINE = 100


def explain(
    levers: LeversArgument = None,
    code: Annotated[
        str | None, typer.Option(help="Only this reason code, e.g. OffloadShortOfReach.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only this far back, e.g. 10m.")] = None,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Maximum number of decisions; 20, or 1000 with --since."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also show ticks that held for the same reason as before.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(help="Read a recording instead of asking the node: journal.sqlite or folder."),
    ] = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Explain why the node moved memory, or did not."""
    import json
    import shutil
    import time
    from contextlib import ExitStack

    from hisparsed.cli.options import known_levers, one_of, seconds
    from hisparsed.control.api.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.journal.records import jsonable
    from hisparsed.control.journal.replay import RecordedJournal
    from hisparsed.control.text.policy import explanation
    from hisparsed.policy.decisions import Reason

    known_levers(levers)
    one_of("--code", code, list(Reason))
    limit = last or (20 if since is None else 1000)
    with ExitStack() as open_client:
        asked: ControlClient | RecordedJournal
        if journal is not None:
            asked = RecordedJournal(journal)
            now_unix_s = asked.end_unix_s
        else:
            asked = open_client.enter_context(ControlClient(socket or DEFAULT_SOCKET))
            now_unix_s = time.time()
        since_unix_s = None if since is None else now_unix_s - seconds("--since", since)
        each: list[str | None] = [*levers] if levers else [None]
        found = [
            one
            for lever in each
            for one in asked.decisions(
                limit=limit, lever=lever, code=code, since=since_unix_s, notable=not every
            )
        ]
        found.sort(key=lambda one: (one.at_unix_s, one.sequence), reverse=True)
        decisions = found[:limit]
        events = [] if levers or code else asked.journal_events(limit)
    # An event older than the oldest decision shown would suggest that nothing happened in between.
    begin = since_unix_s or 0.0
    cut = len(decisions) == limit
    if cut:
        begin = max(begin, decisions[-1].at_unix_s)
    events = [event for event in events if event.at_unix_s >= begin]
    if as_json:
        document = {
            "decisions": [jsonable(one) for one in decisions],
            "events": [jsonable(one) for one in events],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    width = min(_LONGEST_LINE, shutil.get_terminal_size().columns)
    typer.echo(explanation(decisions, events, width=width) or "No decision matches.\n", nl=False)
    if cut and since is not None:
        typer.echo(f"These are the last {limit}; narrow it with a lever or --code, or use --last.")
