"""Shows a running soak to a person: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hisparsed.soak.tally import Tally

_PLAIN_EVERY_S = 15.0


@contextmanager
def soak_display(
    out: TextIO, time_s: Callable[[], float], share_done: Callable[[Tally], float]
) -> Iterator[Callable[[Tally], None]]:
    """A display on ``out``; ``share_done`` is from 0 to 1."""
    if not out.isatty():
        yield _plain_lines(out, time_s)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("soak"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=1.0)

        def show(tally: Tally) -> None:
            bar.update(task, completed=min(1.0, share_done(tally)), description=_state(tally))

        yield show


def _plain_lines(out: TextIO, time_s: Callable[[], float]) -> Callable[[Tally], None]:
    next_s = time_s()

    def show(tally: Tally) -> None:
        nonlocal next_s
        if time_s() >= next_s:
            next_s = time_s() + _PLAIN_EVERY_S
            print(_state(tally), file=out, flush=True)

    return show


def _state(tally: Tally) -> str:
    wrong = len(tally.violations) + tally.token_differences + tally.stuck
    return f"{tally.requests:,} calls, {tally.moves:,} moves, {tally.steps:,} steps, " + (
        f"{wrong} WRONG" if wrong else "all sound"
    )
