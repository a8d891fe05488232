"""Runs the experiments of docs/study.md and puts their tables into it.

    python -m hisparsed.simulate.study --traces FOLDER --data FOLDER [--only NAME] [docs/study.md]

Results are kept in the data folder, one file for each experiment, load and seed; what
is there is not run again. The words between the tables are written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.simulate.experiments import EXPERIMENTS, Experiment
from hisparsed.simulate.summary import PolicyResult
from hisparsed.simulate.table import HEADS, grouped, rows, traffic_text
from hisparsed.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class Part:
    """What one process runs: one experiment with one load and one seed."""

    experiment: Experiment
    own: tuple[str, ...]
    """One of the experiment's ``runs``."""
    seed: int

    def path(self, data: Path) -> Path:
        name = "-".join([self.experiment.name, *self.own[1:], f"seed{self.seed}"])
        return data / f"{name}.json"

    def run(self, traces: str, data: Path) -> None:
        """Unless its results are there. Raises ``UserError`` when it fails."""
        path = self.path(data)
        if path.is_file():
            return
        arguments = self.experiment.command(traces, *self.own, "--seed", str(self.seed))
        command = [sys.executable, "-m", "hisparsed", *arguments, "--json"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
        if ended.returncode:
            raise UserError(f"study: {path.stem} ended with exit code {ended.returncode}")
        write_whole(path, ended.stdout)


def parts(experiments: Sequence[Experiment], seeds: int = sys.maxsize) -> list[Part]:
    """All of the first seed before any of the second; at most so many ``seeds`` of each."""
    most = min(seeds, max(one.seeds for one in experiments))
    return [
        Part(experiment, own, experiment.first_seed + turn)
        for turn in range(most)
        for experiment in experiments
        if turn < experiment.seeds
        for own in experiment.runs
    ]


def run_all(todo: Sequence[Part], traces: str, data: Path, jobs: int) -> None:
    """So many at a time. Goes on after one that fails; raises ``UserError`` with the first."""
    data.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(one.run, traces, data) for one in todo]
    for one in running:
        one.result()


def results_of(experiment: Experiment, data: Path) -> list[PolicyResult]:
    """Of all loads and seeds that have been run."""
    found = []
    for own in experiment.runs:
        for turn in range(experiment.seeds):
            path = Part(experiment, own, experiment.first_seed + turn).path(data)
            if path.is_file():
                document = json.loads(path.read_text("utf-8"))
                found += [PolicyResult.model_validate(one) for one in document["policies"]]
    return found


def with_table(document: str, name: str, table: str) -> str:
    """``document`` with ``table`` between the marks of ``name``. Raises ``UserError``."""
    begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise UserError(f"study: the document has no {begin} followed by {end}")
    return f"{before}{begin}\n{table}{end}{after}"


def markdown(experiment: Experiment, results: Sequence[PolicyResult]) -> str:
    """The command and its figures."""
    runs = [part for own in experiment.runs for part in own]
    seeds = len({one.seed for one in results})
    chosen = ("--seeds", str(seeds)) if seeds > 1 else ()
    if experiment.first_seed:
        chosen = ("--seed", str(experiment.first_seed), *chosen)
    command = " ".join(["hisparsed", *experiment.command("TRACES", *runs, *chosen)])
    if not results:
        return f"\n`{command}`: not run yet.\n\n"
    shown = [HEADS.index(head) for head in experiment.columns]
    heads = [HEADS[0], *experiment.columns]
    lines = ["", f"`{command}`", "", _row(heads), _row(["---"] * len(heads))]
    lines += [_row([f"`{row[0]}`", *(row[one] for one in shown)]) for row in rows(results)]
    if experiment.oracle:
        lines += ["", against_best(results)]
    if any(one.settled_s is not None for one in results):
        lines += ["", recovery(results)]
    return "\n".join(lines) + "\n\n"


def against_best(results: Sequence[PolicyResult]) -> str:
    """The first policy's calls by those of the other one that is best over all seeds."""
    shares = []
    for traffic in dict.fromkeys(map(traffic_text, results)):
        calls: dict[str, dict[int, int]] = {}
        for one in results:
            if traffic_text(one) == traffic:
                calls.setdefault(one.name, {})[one.seed] = one.calls
        first = calls.pop(results[0].name)
        name, best = max(calls.items(), key=lambda item: sum(item[1].values()))
        share = sum(first.values()) / max(1, sum(best.values()))
        said = traffic
        if len(first) > 1:
            each = [first[seed] / max(1, best[seed]) for seed in first]
            said += f", {min(each):.0%} to {max(each):.0%} by seed"
        own = name.removeprefix(f"{results[0].name},")
        shares.append(f"{share:.1%} of `{own}` ({said})")
    return f"`{results[0].name}` against the best of the others: {'; '.join(shares)}."


def recovery(results: Sequence[PolicyResult]) -> str:
    """What followed a change of traffic."""
    parts = []
    for group in grouped(results):
        late = [one.recovered_calls_per_hour or 0.0 for one in group]
        settled = max(one.settled_s or 0.0 for one in group)
        mean = sum(late) / len(late)
        moved = f"split at rest after {settled:.0f}s" if settled else "split unmoved"
        parts.append(f"`{group[0].name}` {mean:,.0f} calls/h, {moved}")
    return f"From five minutes after the change on: {'; '.join(parts)}."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the experiments of the study.")
    parser.add_argument("--traces", required=True, help="folder with the traces")
    parser.add_argument("--data", required=True, type=Path, help="folder for the results")
    parser.add_argument("--only", choices=[one.name for one in EXPERIMENTS], action="append")
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="at most so many of each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--tables", action="store_true", help="run nothing, show what is there")
    parser.add_argument("document", nargs="?", type=Path, default=Path("docs/study.md"))
    given = parser.parse_args()
    chosen = [one for one in EXPERIMENTS if not given.only or one.name in given.only]
    if not given.tables:
        run_all(parts(chosen, given.seeds), given.traces, given.data, given.jobs)
    text = given.document.read_text("utf-8")
    for experiment in chosen:
        table = markdown(experiment, results_of(experiment, given.data))
        text = with_table(text, experiment.name, table)
    given.document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
