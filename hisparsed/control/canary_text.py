"""The canary's state as a few lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hisparsed.control.status import CanaryRun, CanaryStatus
from hisparsed.control.status_text import clock_text, hanging


def canary_page(status: CanaryStatus, *, width: int = 80) -> str:
    """The whole page, ending in a newline; what is longer than ``width`` goes on below itself."""
    return hanging(_lines(status), width)


def _lines(status: CanaryStatus) -> Iterator[str]:
    yield f"canary     {status.state}{', being asked' if status.running else ''}"
    yield f"found      {status.sentence}"
    if status.last_unix_s is not None:
        yield f"last       {clock_text(status.last_unix_s)} ({status.last_trigger})"
    if status.prompt_tokens:
        yield f"question   {status.prompt_tokens} tokens, answered with {status.answer_tokens}"
    for run in status.last_round:
        yield f"  {run.asked:8} {_run(run)}"
    yield (
        f"cost       {status.scheduled_tokens_total:,} tokens, "
        f"{status.step_seconds_total:.2f}s of steps"
    )
    if status.not_ready:
        yield "ready      no: routers are told to stay away"
    if status.evidence is not None:
        yield f"evidence   {status.evidence}"


def _run(run: CanaryRun) -> str:
    source = "computed anew" if run.recomputed else f"{run.prefix_hit_tokens} tokens held"
    return (
        f"{'equal' if run.equal else 'DIFFERENT'}, {source}; decode steps {run.steps_full} full, "
        f"{run.steps_mixed} mixed, {run.steps_none} no residency"
    )
