"""Shows a running soak to a person: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PLAIN_EVERY_S = 15.0

Show = Callable[[float, str], None]
"""How much is done, from 0 to 1, and the state in words."""


@contextmanager
def soak_display(out: TextIO, time_s: Callable[[], float]) -> Iterator[Show]:
    """A display on ``out``."""
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

        def show(done: float, state: str) -> None:
            bar.update(task, completed=min(1.0, done), description=state)

        yield show


def _plain_lines(out: TextIO, time_s: Callable[[], float]) -> Show:
    next_s = time_s()

    def show(_: float, state: str) -> None:
        nonlocal next_s
        if time_s() >= next_s:
            next_s = time_s() + _PLAIN_EVERY_S
            print(state, file=out, flush=True)

    return show
