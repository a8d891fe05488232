"""The `hisparsed replay` command: reads files, asks the endpoint, runs, prints, writes records.

Shows progress on standard error, as a bar on a terminal and as a line now and then elsewhere;
standard output stays clean for results. A caller with its own plan uses `runner.replay`.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hisparsed.errors import UserError
from hisparsed.replay.client import (
    PromptFormat,
    RequestSettings,
    ServedModel,
    http_client,
    served_model,
)
from hisparsed.replay.plan import (
    ReplayPlan,
    choose_sessions,
    limit_calls,
    parse_duration_s,
    parse_scale,
    parse_token_range,
    poisson_arrivals,
    recorded_arrivals,
)
from hisparsed.replay.results import CallResult, ReplayResult, summarise
from hisparsed.replay.runner import ReplayProgress, replay
from hisparsed.replay.scaled_trace import PromptMaker, ScaledSession, figures, scale_trace
from hisparsed.replay.trace import SHIPPED_TRACE, Trace, load_trace

PLAIN_INTERVAL_S = 10.0


class ReplayDisplay(Protocol):
    """Takes a replay's progress."""

    def __call__(self, progress: ReplayProgress) -> None: ...


class PlainLines:
    """One line at the first call, then at most one in `PLAIN_INTERVAL_S`, and one at the last."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_at_s = 0.0

    def __call__(self, progress: ReplayProgress) -> None:
        if progress.seconds < self._next_at_s and progress.done < progress.total:
            return
        self._next_at_s = progress.seconds + PLAIN_INTERVAL_S
        print(
            f"{progress.done}/{progress.total} calls, {_state(progress)}, {progress.seconds:.0f} s",
            file=self._out,
            flush=True,
        )


@contextmanager
def progress_display(out: TextIO, total: int) -> Iterator[ReplayDisplay]:
    """A display on `out` for a replay of `total` calls."""
    if not out.isatty():
        yield PlainLines(out)
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=total)

        def show(progress: ReplayProgress) -> None:
            bar.update(task, completed=progress.done, description=_state(progress))

        yield show


def _state(progress: ReplayProgress) -> str:
    return (
        f"{progress.failed} failed, {progress.retries} sent again, "
        f"{progress.tokens_in:,} tokens in, {progress.tokens_out:,} out"
    )


EXIT_INTERRUPTED = 130
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The command's options as typed; texts are parsed here."""

    url: str
    trace: Path | None
    model: str | None
    scale: str
    concurrency: int
    arrivals: Path | None
    rate: float | None
    recorded_starts: bool
    sessions: int | None
    duration: str | None
    requests: int | None
    seed: int
    time_scale: float
    max_model_len: int | None
    prompt_format: str
    token_range: str
    timeout: str
    api_key: str | None
    out: Path | None
    as_json: bool
    dry_run: bool


def run_command(options: ReplayOptions) -> int:
    """Run the replay and return the exit code; UserError for what the operator got wrong."""
    trace = load_trace(options.trace or SHIPPED_TRACE)
    if options.dry_run:
        plan = make_plan(options, trace, ServedModel("none", options.max_model_len))
        size = figures(plan.planned_sessions, plan.prompts.scale, plan.concurrency)
        print(json.dumps(size.to_dict()) if options.as_json else size.to_text())  # noqa: T201
        return 0
    with ExitStack() as files:
        records = files.enter_context(_create(options.out)) if options.out else None
        result = asyncio.run(_probe_and_replay(options, trace))
        summary = summarise(result)
        print(json.dumps(summary.to_dict()) if options.as_json else summary.to_text())  # noqa: T201
        if records:
            _write_records(records, result.calls)
    if result.stopped_by == "interrupted":
        return EXIT_INTERRUPTED
    return 1 if summary.failed or not summary.requests else 0


def make_plan(options: ReplayOptions, trace: Trace, model: ServedModel) -> ReplayPlan:
    """The plan the options ask for, for an endpoint that serves `model`."""
    if options.prompt_format not in get_args(PromptFormat):
        raise UserError(
            f"--prompt-format: {options.prompt_format!r} is not right; need ids or text"
        )
    limit = options.max_model_len or model.max_model_len
    scaled = scale_trace(trace, parse_scale(options.scale), limit)
    sessions = choose_sessions(scaled, options.sessions, options.seed)
    if options.requests is not None:
        sessions = limit_calls(sessions, options.concurrency, options.requests)
    arrivals_s = _arrivals_s(options, sessions)
    if options.recorded_starts:
        sessions = tuple(sorted(sessions, key=lambda session: session.start_s))
    duration_s = parse_duration_s("--for", options.duration) if options.duration else None
    return ReplayPlan(
        url=options.url,
        request=RequestSettings(
            model=model.name,
            prompt_format=cast(PromptFormat, options.prompt_format),
            timeout_s=parse_duration_s("--timeout", options.timeout),
        ),
        prompts=PromptMaker(scaled.scale, options.seed, parse_token_range(options.token_range)),
        sessions=sessions,
        concurrency=options.concurrency,
        arrivals_s=arrivals_s,
        time_scale=options.time_scale,
        duration_s=duration_s,
        api_key=options.api_key,
        clipped=scaled.clipped,
        dropped=scaled.dropped,
    )


def _arrivals_s(
    options: ReplayOptions, sessions: tuple[ScaledSession, ...]
) -> tuple[float, ...] | None:
    given = [options.arrivals is not None, options.rate is not None, options.recorded_starts]
    if sum(given) > 1:
        raise UserError("--arrivals, --rate, --recorded-starts: give one of them, not several")
    if options.arrivals is not None:
        return recorded_arrivals(options.arrivals)
    if options.rate is not None:
        if not 0 < options.rate < float("inf"):
            raise UserError(
                f"--rate: {options.rate} is not right; need sessions per second above 0"
            )
        return poisson_arrivals(len(sessions), options.rate, options.seed)
    if options.recorded_starts:
        return tuple(sorted(session.start_s for session in sessions))
    return None


async def _probe_and_replay(options: ReplayOptions, trace: Trace) -> ReplayResult:
    async with http_client(options.url, _PROBE_TIMEOUT_S, options.api_key) as http:
        model = await served_model(http, options.model)
    plan = make_plan(options, trace, model)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with progress_display(sys.stderr, plan.calls) as show:
        return await replay(plan, on_progress=show, stop=stop)


def _create(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror}") from error


def _write_records(records: TextIO, calls: tuple[CallResult, ...]) -> None:
    try:
        records.writelines(json.dumps(call.to_dict()) + "\n" for call in calls)
        records.flush()
    except OSError as error:
        raise UserError(f"--out: cannot write {records.name}: {error.strerror}") from error
