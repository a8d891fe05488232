"""`hisparsed explain`: the last decisions as sentences with the figures behind them.

Shows what moved and what changed its reason; `--all` shows every tick. Events such as
reloads and freezes stand between the decisions where these are not filtered.
"""

from pathlib import Path
from typing import Annotated

import typer

from hisparsed.cli.options import JsonOption, SocketOption

_LONGEST_LINE = 100


def explain(
    lever: Annotated[
        str | None, typer.Option(help="Only this: split, multiplier, admission or watermark.")
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="Only this reason code, e.g. OffloadShortOfReach.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only the last such time, e.g. 10m.")] = None,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="At most so many decisions; 20, or 1000 with --since."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also ticks that held for the same reason as before.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(help="Read a recording instead of asking the node: journal.sqlite or folder."),
    ] = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Say why the node moved memory, and why it did not."""
    import json
    import shutil
    import time
    from contextlib import ExitStack

    from hisparsed.cli.options import one_of, seconds
    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.explain_text import explanation
    from hisparsed.control.recorded import RecordedJournal
    from hisparsed.control.records import jsonable
    from hisparsed.policy.reasons import Lever, Reason

    one_of("--lever", lever, list(Lever))
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
        decisions = asked.decisions(
            limit=limit, lever=lever, code=code, since=since_unix_s, notable=not every
        )
        events = [] if lever or code else asked.journal_events(limit)
    # An event older than the oldest decision shown would suggest that nothing lay between.
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
    typer.echo(explanation(decisions, events, width=width) or "No decision fits.\n", nl=False)
    if cut and since is not None:
        typer.echo(f"These are the last {limit}; narrow it with --lever or --code, or use --last.")
