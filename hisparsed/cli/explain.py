"""`hisparsed explain`: the last decisions as sentences with the figures behind them.

Shows what moved and what changed its reason; `--all` shows every tick. Events such as
reloads and freezes stand between the decisions where these are not filtered.
"""

from pathlib import Path
from typing import Annotated

import typer


def explain(
    lever: Annotated[
        str | None, typer.Option(help="Only this: split, multiplier, admission or watermark.")
    ] = None,
    code: Annotated[
        str | None, typer.Option(help="Only this reason code, e.g. OffloadShortOfReach.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only the last such time, e.g. 10m.")] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="At most so many decisions.")] = 20,
    every: Annotated[
        bool, typer.Option("--all", help="Also ticks that held for the same reason as before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, newest first.")] = False,
    socket: Annotated[
        Path | None,
        typer.Option(
            envvar="HISPARSED_SOCKET",
            help="Control socket of the daemon; /run/hisparsed/control.sock if not given.",
        ),
    ] = None,
) -> None:
    """Say why the node moved memory, and why it did not."""
    import json
    import time

    from hisparsed.control.client import DEFAULT_SOCKET, ControlClient
    from hisparsed.control.explain_text import explanation
    from hisparsed.control.records import jsonable
    from hisparsed.errors import UserError
    from hisparsed.policy.reasons import Lever, Reason
    from hisparsed.policy.units import parse_duration

    _check("--lever", lever, list(Lever))
    _check("--code", code, list(Reason))
    try:
        since_unix_s = None if since is None else time.time() - parse_duration(since)
    except ValueError:
        raise UserError(f'--since: "{since}" is not a time; write 30s, 10m or 1h30m') from None
    with ControlClient(socket or DEFAULT_SOCKET) as client:
        decisions = client.decisions(
            limit=last, lever=lever, code=code, since=since_unix_s, notable=not every
        )
        events = [] if lever or code else client.journal_events(last)
    # An event older than the oldest decision shown would suggest that nothing lay between.
    begin = since_unix_s or 0.0
    if len(decisions) == last:
        begin = max(begin, decisions[-1].at_unix_s)
    events = [event for event in events if event.at_unix_s >= begin]
    if as_json:
        document = {
            "decisions": [jsonable(one) for one in decisions],
            "events": [jsonable(one) for one in events],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(explanation(decisions, events) or "No decision fits.\n", nl=False)


def _check(option: str, value: str | None, known: list[str]) -> None:
    from hisparsed.errors import UserError

    if value is not None and value not in known:
        raise UserError(f'{option}: "{value}" is not known; use one of {", ".join(known)}')
