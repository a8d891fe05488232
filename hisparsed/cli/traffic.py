"""`hisparsed replay`, `demo` and `soak`: send traffic to a node and check what comes back.

``replay`` and ``demo`` exit with 1 when a call failed, ``demo`` also when a token differs, ``soak``
when anything was wrong. All exit with 2 for wrong input, and with 130 when
interrupted. Imports beyond typer wait until a command runs.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

_DEFAULT_URL = "http://127.0.0.1:8000"
_EXIT_INTERRUPTED = 130


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
        float | None, typer.Option(help="Sessions per second (Poisson), instead of one by one.")
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
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after this many calls.")] = None,
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
        str, typer.Option(help="Token ids of prompts, LOW:HIGH (HIGH excluded).")
    ] = "32:127",
    timeout: Annotated[str, typer.Option(help="Longest time for one call.")] = "10m",
    api_key: Annotated[
        str | None, typer.Option(envvar="HISPARSED_API_KEY", help="Key the endpoint asks for.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one JSON line per call to this file.")
    ] = None,
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


def demo(
    run_for: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="About how long the calls take, e.g. 20s; if not given, the whole command takes "
            "about three minutes.",
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(min=0.1, help="Live set / reach; default 1.5. Below 1 everything fits."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="standard, or small: a quarter of the work, for a slow machine.")
    ] = "standard",
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the summary as one JSON object.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model and the prompts.")] = 0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at a time, instead of --load.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Where the HTML report goes; a new temporary file if not.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of the live view of a terminal.")
    ] = False,
) -> None:
    """Show the node at work: the same calls with the policy on and with it off."""
    try:
        code = _run_demo(run_for, load, model, as_json, seed, concurrency, report, plain)
    except KeyboardInterrupt:
        typer.echo("Interrupted: the demo has ended, and nothing of it runs on.", err=True)
        code = _EXIT_INTERRUPTED
    if code:
        raise typer.Exit(code)


def _run_demo(
    run_for: str | None,
    load: float | None,
    model: str,
    as_json: bool,
    seed: int,
    concurrency: int | None,
    report: Path | None,
    plain: bool,
) -> int:
    from hisparsed.demo.report import default_path, require_writable, write_report
    from hisparsed.demo.run import DemoOptions, run_demo
    from hisparsed.demo.summary import in_words, summary_document
    from hisparsed.demo.workload import DEFAULT_LOAD
    from hisparsed.replay.plan import parse_duration_s

    options = DemoOptions(
        model=model,
        load=load or DEFAULT_LOAD,
        concurrency=concurrency,
        calls_s=parse_duration_s("--for", run_for) if run_for else None,
        seed=seed,
        view=not plain and not as_json and _has_terminal(),
    )

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    if report is not None:
        require_writable(report)
    comparison = run_demo(options, say=say)
    say(in_words(comparison))
    document = summary_document(comparison)
    if as_json:
        print(json.dumps(document))  # noqa: T201 (the result)
    page = report or default_path()
    write_report(comparison, page)
    say(f"Report with plots: {page}")
    failed = document["failed"] or document["policy_off"]["failed"]
    return 1 if failed or document["token_differences"] else 0


def _has_terminal() -> bool:
    """Whether this process may draw on the terminal: a background process would be stopped."""
    import os

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # a terminal without job control
        return True


def soak(
    run_for: Annotated[
        str | None,
        typer.Option("--for", help="How long to send calls, such as 10m; default 60s."),
    ] = None,
    moves: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many moves instead.")
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
        int, typer.Option(min=0, max=16, help="Draft tokens per step of the node under test.")
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
    """Send random traffic, move all levers at random, and check the answers."""
    from hisparsed.errors import UserError
    from hisparsed.replay.plan import parse_duration_s
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
