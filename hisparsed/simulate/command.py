"""The `hisparsed simulate` command: runs, progress, tables, and the folder of `--out`.

Everything is checked before the first run starts. In the folder, files that an earlier run of this
command wrote are replaced and files of others stay. `journals.txt` lists the journals; a folder
without it was not written by this command.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hisparsed.errors import UserError
from hisparsed.policy.units import counted
from hisparsed.replay.plan import parse_duration_s
from hisparsed.simulate.policies import PolicyChoice, choose_policies
from hisparsed.simulate.report import (
    PLOT_FILES,
    draw_all,
    require_plots,
    results_text,
    write_report,
)
from hisparsed.simulate.results import (
    Limits,
    Measures,
    PolicyResult,
    ScaleError,
    after_change,
    error_text,
    paired,
    scale_error,
    summarise,
)
from hisparsed.simulate.sampling import Sample, samples_of
from hisparsed.simulate.scenario import Scenario, SimulateOptions, scenarios_of
from hisparsed.simulate.sizes import fitting_sizes


class RunDisplay(Protocol):
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
def progress_display(out: TextIO, runs: int, duration_s: float) -> Iterator[RunDisplay]:
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


LIST, RESULTS, REPORT = "journals.txt", "results.json", "report.html"
_FILES = (RESULTS, REPORT, *PLOT_FILES)
_TITLE = "Written by hisparsed simulate; each journal folder and its run.\n"
_JOURNAL = re.compile(r"journal-\d+", re.ASCII)
_JOURNAL_FILE = "journal.sqlite"


def check_folder(folder: Path) -> None:
    """Make ``folder``, changing nothing in it.

    Raises ``UserError`` where it cannot be made or holds what this command did not write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name: path for path in folder.iterdir()}
    except OSError as error:
        raise UserError(
            f"--out: {folder} cannot be a folder ({error.strerror}); name one that is there or can "
            "be made"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: {folder} cannot be written; name a folder that can")
    for name in (LIST, *_FILES):
        if name in there and (there[name].is_symlink() or not there[name].is_file()):
            raise UserError(f"--out: {there[name]} is not a file; move it, or name another folder")
    ours = _listed(folder)
    for name, path in sorted(there.items()):
        strange = name in _FILES and ours is None
        if _JOURNAL.fullmatch(name):
            strange = name not in (ours or ()) or _is_foreign(path)
        if strange or (name == LIST and ours is None):
            raise UserError(
                f"--out: {path} was not written by this command; move it, or name another folder"
            )


def begin_folder(folder: Path, runs: Sequence[str | None]) -> list[Path | None]:
    """Remove what an earlier run of this command left; a place for the journal of each run.

    ``None`` is a run without a journal. Call ``check_folder`` before. Raises ``UserError``.
    """
    journals = {f"journal-{number}": run for number, run in enumerate(runs)}
    try:
        for name in _listed(folder) or ():
            journal = folder / name
            if journal.is_dir():
                for file in journal.iterdir():
                    file.unlink()
                journal.rmdir()
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        lines = [f"{name}  {run}\n" for name, run in journals.items() if run is not None]
        (folder / LIST).write_text(_TITLE + "".join(lines), "utf-8")
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be written: {error.strerror}") from None
    return [None if run is None else folder / name for name, run in journals.items()]


def _listed(folder: Path) -> list[str] | None:
    """Journals that this command wrote; ``None`` where it wrote nothing."""
    try:
        text = (folder / LIST).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith(_TITLE):
        return None
    first = [line.partition(" ")[0] for line in text.splitlines()[1:]]
    return [name for name in first if _JOURNAL.fullmatch(name)]


def _is_foreign(journal: Path) -> bool:
    """Whether it holds anything but files of a journal."""
    if journal.is_symlink() or not journal.is_dir():
        return True
    return any(
        file.is_dir() or not file.name.startswith(_JOURNAL_FILE) for file in journal.iterdir()
    )


@dataclass
class _Done:
    """The runs that have finished so far."""

    results: list[PolicyResult] = field(default_factory=list)
    runs: dict[str, Measures] = field(default_factory=dict)
    """The first seed's, by label."""


def run_command(options: SimulateOptions) -> None:
    """Run everything and print it; raises ``UserError`` for what the operator got wrong.

    Where a run fails, what finished before it is printed first.
    """
    policies = choose_policies(options.policies, options.sweep)
    scenarios = scenarios_of(options)
    check_s = None
    if options.check_scale is not None:
        check_s = parse_duration_s("--check-scale", options.check_scale)
    limits = Limits(
        ttft_s=parse_duration_s("--ttft-limit", options.ttft_limit),
        itl_s=parse_duration_s("--itl-limit", options.itl_limit),
    )
    for scenario in scenarios:
        for policy in policies:
            fitting_sizes(scenario, policy)
    if options.out is not None:
        require_plots()
        check_folder(options.out)
    seeds = range(options.seed, options.seed + options.seeds)
    samples = samples_of(scenarios, seeds)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    logging.getLogger("hisparsed").setLevel(logging.ERROR)
    done, error = _Done(), None
    try:
        _run_all(options, policies, scenarios, limits, done)
        if check_s is not None:
            error = _check_scale(scenarios[0], policies[0], options.seed, check_s, limits)
    except BaseException:
        if done.results:
            _print(scenarios[0], options, samples, done, error)
        raise
    facts = _print(scenarios[0], options, samples, done, error)
    if options.out is not None:
        _write(options.out, scenarios[0], samples, facts, done, error)


def _print(
    scenario: Scenario,
    options: SimulateOptions,
    samples: Sequence[Sample],
    done: _Done,
    error: ScaleError | None,
) -> list[str]:
    """Returns the sentences on what was simulated."""
    facts = _facts(scenario, options, samples, error)
    if options.as_json:
        document = _document(scenario, samples, done.results, error)
        print(json.dumps(document, indent=2), flush=True)  # noqa: T201
    else:
        print("\n".join([*facts, ""]))  # noqa: T201
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(results_text(done.results, width), end="", flush=True)  # noqa: T201
    return facts


def _run_all(
    options: SimulateOptions,
    policies: Sequence[PolicyChoice],
    scenarios: Sequence[Scenario],
    limits: Limits,
    done: _Done,
) -> None:
    """Into ``done``, in order."""
    from hisparsed.simulate.run import run_policy

    first: dict[int, Measures] = {}
    seeds = range(options.seed, options.seed + options.seeds)
    pairs = [(scenario, policy) for scenario in scenarios for policy in policies]
    labels = [scenario_label(scenario, policy, len(scenarios)) for scenario, policy in pairs]
    journals: list[Path | None] = [None] * len(pairs)
    if options.out is not None:
        steering = [policy.text is not None for _, policy in pairs]
        runs = [
            f"{label}, seed {seeds[0]}" if steers else None
            for label, steers in zip(labels, steering, strict=True)
        ]
        journals = begin_folder(options.out, runs)
    with (
        tempfile.TemporaryDirectory(prefix="hisparsed-simulate-") as work,
        progress_display(sys.stderr, len(pairs) * len(seeds), scenarios[0].duration_s) as display,
    ):
        for number, (scenario, policy) in enumerate(pairs):
            label, base = labels[number], number % len(policies) == 0
            for seed in seeds:
                display.begin(f"{label}, seed {seed}")
                measures = run_policy(
                    scenario,
                    policy,
                    seed,
                    work_folder=Path(work),
                    journal_folder=journals[number] if seed == seeds[0] else None,
                    progress=display.at,
                )
                done.runs.setdefault(label, measures)
                if base:
                    first[seed] = measures
                result = _summary(scenario, policy, seed, measures, limits)
                result = paired(result, measures, first[seed])
                if options.then is not None:
                    change_s, scale = scenario.duration_s / 2, float(scenario.scale)
                    result = after_change(result, measures, change_s, scale)
                done.results.append(result)


def scenario_label(scenario: Scenario, policy: PolicyChoice, scenarios: int) -> str:
    if scenarios == 1:
        return policy.name
    paces = [] if scenario.users is None else [f"{scenario.users} users"]
    paces += [] if scenario.load is None else [f"load {scenario.load:g}"]
    return ", ".join([policy.name, *paces])


def _summary(
    scenario: Scenario, policy: PolicyChoice, seed: int, measures: Measures, limits: Limits
) -> PolicyResult:
    return summarise(
        policy.name,
        scenario.users,
        seed,
        measures,
        scale=scenario.scale,
        copy_bandwidth=scenario.node.gpu.copy_bandwidth,
        limits=limits,
        trace_load=scenario.load,
    )


def _check_scale(
    scenario: Scenario, policy: PolicyChoice, seed: int, seconds: float, limits: Limits
) -> ScaleError:
    from hisparsed.simulate.run import run_policy

    short = replace(scenario, duration_s=seconds, warmup_s=seconds / 4)
    found = []
    with tempfile.TemporaryDirectory(prefix="hisparsed-simulate-") as work:
        for scale in (scenario.scale, Fraction(1)):
            one = replace(short, scale=scale)
            measures = run_policy(one, policy, seed, work_folder=Path(work))
            found.append(_summary(one, policy, seed, measures, limits))
    return scale_error(*found)


def _facts(
    scenario: Scenario,
    options: SimulateOptions,
    samples: Sequence[Sample],
    error: ScaleError | None,
) -> list[str]:
    names = ", ".join(one.sessions.name for one in scenario.traffic)
    facts = [
        f"{scenario.node.title}, simulated: {names}, {scenario.duration_s / 60:g} virtual minutes, "
        f"the first {scenario.warmup_s / 60:g} not counted, scale {scenario.scale}, "
        f"{counted(options.seeds, 'seed')} from {options.seed}"
        f"{'' if options.half is None else f', half {options.half} of the sessions'}.",
        *(one.text for one in samples),
    ]
    if scenario.scale < 1:
        facts.append(
            "Error against the whole node: not measured; --check-scale 10m measures it."
            if error is None
            else error_text(error)
        )
    return facts


def _document(
    scenario: Scenario,
    samples: Sequence[Sample],
    results: Sequence[PolicyResult],
    error: ScaleError | None,
) -> dict[str, object]:
    return {
        "node": scenario.node.title,
        "traces": [one.sessions.name for one in scenario.traffic],
        "scale": str(scenario.scale),
        "duration_s": scenario.duration_s,
        "warmup_s": scenario.warmup_s,
        "samples": [one.model_dump() for one in samples],
        "scale_error": None if error is None else error.model_dump(),
        "policies": [one.model_dump() for one in results],
    }


def _write(
    folder: Path,
    scenario: Scenario,
    samples: Sequence[Sample],
    facts: Sequence[str],
    done: _Done,
    error: ScaleError | None,
) -> None:
    try:
        plots = draw_all(folder, done.runs, done.results)
        document = json.dumps(_document(scenario, samples, done.results, error), indent=2)
        (folder / RESULTS).write_text(document + "\n", "utf-8")
        write_report(
            folder / REPORT,
            title=f"hisparsed simulate: {scenario.node.title}",
            facts=facts,
            results=done.results,
            runs=done.runs,
            plots=plots,
        )
    except OSError as problem:
        raise UserError(f"--out: {folder} cannot be written: {problem.strerror}") from None
    print(f"Report: {folder / REPORT}", file=sys.stderr)  # noqa: T201
