"""Runs the experiments of docs/study.md and puts their tables into it.

    python -m hisparsed.simulate.study --traces FOLDER --data FOLDER [--only NAME] [docs/study.md]

Every experiment is a call of `hisparsed simulate`, so that each can be repeated alone. Results
are kept in the data folder; what is there is not run again. The words between the tables are
written by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.simulate.summary import PolicyResult
from hisparsed.simulate.table import HEADS, rows

ADAPTIVE = "policy,hot.min=0.25,hot.start=0.5,hot.max=1.25"
"""The shipped policy with hot buffers from 1x to 5x top-k, as MTP3 allows with scratch rows."""
_AGENTS = "{traces}/claude-code-128k.jsonl.gz"
_CHAT = "{traces}/mooncake-conversation.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Experiment:
    """``name`` is that of its table; ``policies`` and ``options`` as on the command line."""

    name: str
    policies: Sequence[str]
    options: Sequence[str]

    def command(self, traces: str) -> list[str]:
        """Arguments of `hisparsed`."""
        policies = [part for policy in self.policies for part in ("--policy", policy)]
        return ["simulate", *(one.format(traces=traces) for one in self.options), *policies]


_TIME = ("--for", "20m", "--warmup", "5m")
_NO_ADMISSION = f"{ADAPTIVE},levers.admission.mode=off"
EXPERIMENTS = (
    Experiment(
        "openhands",
        ("standard", "stock", ADAPTIVE),
        (
            *("--trace", "openhands", "--users", "32"),
            *("--for", "3m", "--warmup", "1m", "--scale", "1/2"),
        ),
    ),
    Experiment(
        "ample",
        (
            *("stock", ADAPTIVE, f"{ADAPTIVE},pools.hisparse=90%"),
            *(f"{ADAPTIVE},pools.hisparse=97%", _NO_ADMISSION),
        ),
        ("--trace", _AGENTS, "--users", "64", "--for", "30m"),
    ),
    Experiment(
        "near",
        ("stock", ADAPTIVE, _NO_ADMISSION),
        ("--trace", _AGENTS, "--users", "128", *_TIME),
    ),
    Experiment(
        "crowded",
        ("stock", ADAPTIVE, _NO_ADMISSION),
        ("--trace", _AGENTS, "--users", "192", *_TIME),
    ),
    Experiment(
        "split",
        tuple(f"{ADAPTIVE},pools.hisparse={share}%" for share in (75, 85, 90, 95, 97)),
        ("--trace", _AGENTS, "--users", "128", *_TIME, "--seeds", "2"),
    ),
    Experiment(
        "change",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--users", "128", "--then", _CHAT, *_TIME),
    ),
    Experiment("chat", ("stock", ADAPTIVE), ("--trace", _CHAT, *_TIME, "--seeds", "2")),
    Experiment(
        "hot",
        (
            "policy",
            f"{ADAPTIVE},hot.start=1.25,levers.multiplier.mode=off",
            f"{ADAPTIVE},levers.multiplier.mode=off",
            ADAPTIVE,
        ),
        ("--trace", _AGENTS, "--users", "128", *_TIME, "--seeds", "2"),
    ),
)


def results_of(experiment: Experiment, traces: str, data: Path) -> list[PolicyResult]:
    """From the data folder, or by running it. Raises ``UserError`` when that fails."""
    path = data / f"{experiment.name}.json"
    if not path.is_file():
        command = [sys.executable, "-m", "hisparsed", *experiment.command(traces), "--json"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
        if ended.returncode:
            raise UserError(f"study: {experiment.name} ended with exit code {ended.returncode}")
        data.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ended.stdout)
    document = json.loads(path.read_text("utf-8"))
    return [PolicyResult.model_validate(one) for one in document["policies"]]


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
    command = " ".join(["hisparsed", *experiment.command("TRACES")])
    lines = ["", f"`{command}`", "", _row(HEADS), _row(["---"] * len(HEADS))]
    lines += [_row([f"`{name}`", *cells]) for name, *cells in rows(results)]
    return "\n".join(lines) + "\n\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the experiments of the study.")
    parser.add_argument("--traces", required=True, help="folder with the traces")
    parser.add_argument("--data", required=True, type=Path, help="folder for the results")
    parser.add_argument("--only", choices=[one.name for one in EXPERIMENTS], action="append")
    parser.add_argument("document", nargs="?", type=Path, default=Path("docs/study.md"))
    given = parser.parse_args()
    for experiment in EXPERIMENTS:
        if given.only and experiment.name not in given.only:
            continue
        results = results_of(experiment, given.traces, given.data)
        text = given.document.read_text("utf-8")
        table = markdown(experiment, results)
        given.document.write_text(with_table(text, experiment.name, table), "utf-8")


if __name__ == "__main__":
    main()
