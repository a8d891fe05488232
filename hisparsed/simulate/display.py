"""Progress of a simulation on standard error: a bar on a terminal, a line a run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Display(Protocol):
    def begin(self, label: str) -> None:
        """Another run starts."""
        ...

    def at(self, seconds: float) -> None:
        """Virtual seconds of it that are done."""
        ...


class _Lines:
    def __init__(self, out: TextIO, runs: int) -> None:
        self._out = out
        self._runs = runs
        self._run = 0

    def begin(self, label: str) -> None:
        self._run += 1
        print(f"run {self._run} of {self._runs}: {label}", file=self._out, flush=True)

    def at(self, seconds: float) -> None:
        """A line a run is enough."""


class _Bar:
    def __init__(self, bar: Bar, runs: int, duration_s: float) -> None:
        self._bar = bar
        self._duration_s = duration_s
        self._task = bar.add_task("", total=runs * duration_s)
        self._before_s = -duration_s

    def begin(self, label: str) -> None:
        self._before_s += self._duration_s
        self._bar.update(self._task, completed=self._before_s, description=label)

    def at(self, seconds: float) -> None:
        self._bar.update(self._task, completed=self._before_s + seconds)


@contextmanager
def progress_display(out: TextIO, runs: int, duration_s: float) -> Iterator[Display]:
    """A display on ``out`` for ``runs`` runs of ``duration_s`` virtual seconds."""
    if not out.isatty():
        yield _Lines(out, runs)
        return
    columns = (
        TextColumn("simulate"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(file=out)) as bar:
        yield _Bar(bar, runs, duration_s)
