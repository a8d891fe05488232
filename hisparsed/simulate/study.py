"""Runs the experiments of docs/study.md and puts their tables into it.

    python -m hisparsed.simulate.study --traces FOLDER --data FOLDER [--only NAME] [docs/study.md]

Results are kept in the data folder, one file for each experiment and seed; what is there is not
run again. The words between the tables are written by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.simulate.experiments import EXPERIMENTS, Experiment
from hisparsed.simulate.summary import PolicyResult
from hisparsed.simulate.table import HEADS, grouped, rows


def run(experiment: Experiment, seed: int, traces: str, data: Path) -> None:
    """Unless its results are there. Raises ``UserError`` when it fails."""
    path = _path(experiment, seed, data)
    if path.is_file():
        return
    arguments = experiment.command(traces, "--seed", str(seed))
    command = [sys.executable, "-m", "hisparsed", *arguments, "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
    if ended.returncode:
        raise UserError(f"study: {experiment.name} ended with exit code {ended.returncode}")
    data.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ended.stdout)


def results_of(experiment: Experiment, data: Path) -> list[PolicyResult]:
    """Of all seeds that have been run."""
    found = []
    for seed in range(experiment.seeds):
        path = _path(experiment, seed, data)
        if path.is_file():
            document = json.loads(path.read_text("utf-8"))
            found += [PolicyResult.model_validate(one) for one in document["policies"]]
    return found


def _path(experiment: Experiment, seed: int, data: Path) -> Path:
    return data / f"{experiment.name}-{seed}.json"


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
    if not results:
        return f"\n`{' '.join(['hisparsed', *experiment.command('TRACES')])}`: not run yet.\n\n"
    seeds = len({one.seed for one in results})
    chosen = ("--seeds", str(seeds)) if seeds > 1 else ()
    command = " ".join(["hisparsed", *experiment.command("TRACES", *chosen)])
    lines = ["", f"`{command}`", "", _row(HEADS), _row(["---"] * len(HEADS))]
    lines += [_row([f"`{name}`", *cells]) for name, *cells in rows(results)]
    if experiment.oracle:
        lines += ["", against_best(results)]
    if any(one.settled_s is not None for one in results):
        lines += ["", recovery(results)]
    return "\n".join(lines) + "\n\n"


def against_best(results: Sequence[PolicyResult]) -> str:
    """The first policy's calls by those of the best other one, seed by seed."""
    shares = []
    for seed in sorted({one.seed for one in results}):
        first, *others = (one for one in results if one.seed == seed)
        best = max(others, key=lambda one: one.calls)
        shares.append(f"{first.calls / max(1, best.calls):.1%} (`{best.name}`)")
    return f"`{results[0].name}` against the best of the others, by seed: {', '.join(shares)}."


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
    parser.add_argument("--tables", action="store_true", help="run nothing, show what is there")
    parser.add_argument("document", nargs="?", type=Path, default=Path("docs/study.md"))
    given = parser.parse_args()
    chosen = [one for one in EXPERIMENTS if not given.only or one.name in given.only]
    rounds = 0 if given.tables else min(given.seeds, max(one.seeds for one in chosen))
    for seed in range(rounds):
        for experiment in chosen:
            if seed < experiment.seeds:
                run(experiment, seed, given.traces, given.data)
    text = given.document.read_text("utf-8")
    for experiment in chosen:
        table = markdown(experiment, results_of(experiment, given.data))
        text = with_table(text, experiment.name, table)
    given.document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
