"""`hisparsed soak`: a node under random traffic and random moves, every answer open to proof.

Exit code 0 when nothing was wrong, 1 otherwise, 2 for wrong input, 130 when interrupted.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def soak(
    run_for: Annotated[
        str | None,
        typer.Option("--for", help="How long to send calls, such as 10m; default 60s."),
    ] = None,
    moves: Annotated[
        int | None, typer.Option(min=1, help="End after so many moves instead.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is random.")] = 0,
    moves_every: Annotated[
        str,
        typer.Option(
            help="Mean time between moves; of the engine's clock, on which a step takes 20 ms."
        ),
    ] = "300ms",
    trace: Annotated[
        Path | None, typer.Option(help="Trace file; the shipped coding trace if not given.")
    ] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=0, max=16, help="Draft tokens a step of the node under test.")
    ] = 0,
    eager_host_mirror: Annotated[
        bool, typer.Option(help="Whether each decoded row goes to the host at once.")
    ] = True,
    daemon: Annotated[
        bool,
        typer.Option(
            "--daemon", help="Soak a real daemon over HTTP, in real time, instead of an engine."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the result, as one JSON object.")
    ] = False,
) -> None:
    """Soak a node: random traffic, random moves, every answer open to proof."""
    from hisparsed.errors import UserError
    from hisparsed.replay.options import parse_duration_s
    from hisparsed.replay.trace import SHIPPED_TRACE
    from hisparsed.soak.command import EXIT_INTERRUPTED, run_command
    from hisparsed.soak.settings import SoakSettings

    if daemon and (moves is not None or speculative_tokens or not eager_host_mirror):
        raise UserError(
            "--daemon: it ends by --for and soaks the plain node; leave --moves, "
            "--speculative-tokens and --no-eager-host-mirror out"
        )
    for_s = None
    if run_for is not None or moves is None:
        for_s = parse_duration_s("--for", run_for or "60s")
    settings = SoakSettings(
        seed=seed,
        for_s=for_s,
        max_moves=moves,
        moves_every_s=parse_duration_s("--moves-every", moves_every),
        trace=trace or SHIPPED_TRACE,
        speculative_tokens=speculative_tokens,
        eager_host_mirror=eager_host_mirror,
    )
    result = run_command(settings, sys.stderr, daemon=daemon)
    if not as_json:
        print(result.to_text())  # noqa: T201 (the result)
    print(json.dumps(result.to_dict()))  # noqa: T201 (the result)
    if not result.clean:
        raise typer.Exit(1)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
