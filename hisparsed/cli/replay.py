"""`hisparsed replay`: options in, a plan out, the summary on standard output.

Exit code 0 when every call was answered, 1 when some were not, 2 for wrong input, 130 after Ctrl-C.
Not here: anything that measures. Imports beyond typer wait until the command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

_DEFAULT_URL = "http://127.0.0.1:8000"


def replay(
    url: Annotated[str, typer.Option(help="Address of the OpenAI endpoint.")] = _DEFAULT_URL,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file; the shipped 64k coding trace if not given.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; the endpoint's first if not given.")
    ] = None,
    scale: Annotated[str, typer.Option(help="Factor for all token counts, e.g. 1/16.")] = "1",
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 8,
    arrivals: Annotated[
        Path | None,
        typer.Option(help="CSV with a TIMESTAMP column: when sessions start."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Sessions a second (Poisson), instead of one by one.")
    ] = None,
    recorded_starts: Annotated[
        bool, typer.Option("--recorded-starts", help="Start sessions when the trace started them.")
    ] = False,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="How many sessions, drawn by the seed."),
    ] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="Stop after this time, e.g. 60s or 5m.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many calls.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, session choice and arrivals.")] = 0,
    time_scale: Annotated[
        float, typer.Option(help="Factor for the recorded pauses inside sessions; 0 is none.")
    ] = 0.0,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest call in tokens; the endpoint's if not given.")
    ] = None,
    prompt_format: Annotated[
        str, typer.Option(help="ids, or text for endpoints that refuse token ids.")
    ] = "ids",
    token_range: Annotated[
        str, typer.Option(help="Token ids of prompts, LOW:HIGH (HIGH is left out).")
    ] = "32:127",
    timeout: Annotated[str, typer.Option(help="Longest time for one call.")] = "10m",
    api_key: Annotated[
        str | None, typer.Option(envvar="HISPARSED_API_KEY", help="Key the endpoint asks for.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line a call here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print how large the scaled trace is.")
    ] = False,
) -> None:
    """Replay a recorded trace against an OpenAI endpoint and measure it."""
    from hisparsed.replay.command import ReplayOptions, run_command

    options = ReplayOptions(
        url=url,
        trace=trace,
        model=model,
        scale=scale,
        concurrency=concurrency,
        arrivals=arrivals,
        rate=rate,
        recorded_starts=recorded_starts,
        sessions=sessions,
        duration=for_,
        requests=requests,
        seed=seed,
        time_scale=time_scale,
        max_model_len=max_model_len,
        prompt_format=prompt_format,
        token_range=token_range,
        timeout=timeout,
        api_key=api_key,
        out=out,
        as_json=as_json,
        dry_run=dry_run,
    )
    code = run_command(options)
    if code:
        raise typer.Exit(code)
