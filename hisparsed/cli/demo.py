"""`hisparsed demo`: the reference node, a real trace, the policy on and off, one summary.

Exit code 0 when no call failed and no token differs, 1 otherwise, 2 for wrong input.
"""

import json
import sys
from typing import Annotated

import typer


def demo(
    run_for: Annotated[
        str | None,
        typer.Option("--for", help="How long to replay with the policy on; default 45s."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the summary as one JSON object.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model and the prompts.")] = 0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at a time; more means more pressure.")
    ] = None,
) -> None:
    """Show the node at work."""
    from dataclasses import replace

    from hisparsed.demo.run import run_demo
    from hisparsed.demo.settings import DemoSettings
    from hisparsed.replay.options import parse_duration_s

    settings = replace(DemoSettings(), seed=seed)
    if concurrency is not None:
        settings = replace(settings, concurrency=concurrency)
    duration_s = parse_duration_s("--for", run_for or "45s")

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    document, words = run_demo(settings, duration_s=duration_s, say=say)
    say(words)
    if as_json:
        print(json.dumps(document))  # noqa: T201 (the result)
    if document["failed"] or document["token_differences"]:
        raise typer.Exit(1)
