"""Shows a running replay to a person: a bar on a terminal, a line now and then elsewhere.

Writes to the stream it is given (standard error), so that standard output stays clean for results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hisparsed.replay.runner import Progress

PLAIN_INTERVAL_S = 10.0


class Display(Protocol):
    """Takes a replay's progress."""

    def __call__(self, progress: Progress) -> None: ...


class PlainLines:
    """One line at the first call, then at most one in `PLAIN_INTERVAL_S`, and one at the last."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_at_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.seconds < self._next_at_s and progress.done < progress.total:
            return
        self._next_at_s = progress.seconds + PLAIN_INTERVAL_S
        print(
            f"{progress.done}/{progress.total} calls, {_state(progress)}, {progress.seconds:.0f} s",
            file=self._out,
            flush=True,
        )


@contextmanager
def progress_display(out: TextIO, total: int) -> Iterator[Display]:
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

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, description=_state(progress))

        yield show


def _state(progress: Progress) -> str:
    return (
        f"{progress.failed} failed, {progress.retries} sent again, "
        f"{progress.tokens_in:,} tokens in, {progress.tokens_out:,} out"
    )
