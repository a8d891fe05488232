"""Runs the experiments of docs/figures/study.md and puts their tables into it.

    python -m tests.bench.study --traces FOLDER --data FOLDER [--only NAME] [docs/figures/study.md]

Each experiment is a call of `hisparsed simulate`, in the order of what they are worth: all of them
run with the first seed before any with the second. Results are kept in the data folder, one file
for each experiment, load and seed; what is there is not run again. The words between the tables are
written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hisparsed.atomic_file import write_atomically
from hisparsed.errors import UserError
from hisparsed.simulate.report import HEADS, grouped, predictions, rows, traffic_text
from hisparsed.simulate.results import PolicyResult

ADAPTIVE = "policy"
"""The shipped policy."""
_AGENTS = "{traces}/claude-code-128k.jsonl.gz"
_CHAT = "{traces}/mooncake-conversation.jsonl.gz"


MEMORY = (
    *("users", "calls/h", "spread", "good/h", "hit", "recomputed"),
    *("running", "TTFT p50", "p99", "unserved", "ITL", "load"),
)
PAIRS = (*MEMORY, "p99 of both")
STEPS = (
    *("users", "calls/h", "spread", "tok/s", "good/h", "hit", "preempted"),
    *("running", "TTFT p50", "p99", "ITL", "link", "moves"),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """``name`` is that of its table; ``policies`` and ``options`` as on the command line."""

    name: str
    policies: Sequence[str]
    options: Sequence[str]
    users: Sequence[int] = ()
    """Each is a run of its own; none where sessions start when the trace says."""
    loads: Sequence[float] = ()
    """As ``users``, for the pace at which recorded sessions start."""
    seeds: int = 1
    first_seed: int = 0
    tuned_on: str = ""
    """The experiment with the same policies on other sessions, whose best is judged here."""
    oracle: bool = False
    """Whether the first policy is held against the best of the others."""
    columns: Sequence[str] = MEMORY
    """Heads of the table's columns after the policy."""

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """The options of each run that the others do not have."""
        found: list[tuple[str, ...]] = [("--users", str(count)) for count in self.users]
        found += [("--load", f"{load:g}") for load in self.loads]
        return found or [()]

    def command(self, traces: str, *own: str) -> list[str]:
        """Arguments of `hisparsed`; ``own`` are those of a run and its seeds."""
        policies = [part for policy in self.policies for part in ("--policy", policy)]
        options = [one.format(traces=traces) for one in self.options]
        return ["simulate", *options, *own, *policies]


def _fixed(*shares: int) -> tuple[str, ...]:
    return tuple(f"{ADAPTIVE},pools.hisparse={share}%" for share in shares)


def _held(multiplier: int) -> str:
    """Hot buffers of one size, with scratch for what does not fit."""
    return ADAPTIVE + "".join(f",hot.{key}={multiplier}" for key in ("min", "start", "max"))


def _engaged(at: int, released: int) -> str:
    return f"{ADAPTIVE},admission.engage_at={at}%,admission.release_at={released}%"


def _halves(
    name: str,
    options: Sequence[str],
    *,
    users: Sequence[int] = (),
    loads: Sequence[float] = (),
) -> tuple[Experiment, Experiment]:
    """The same policies on each half of the sessions, the best of one judged on the other."""
    oldest = (f"{ADAPTIVE},admission.oldest_share={share}%" for share in (0, 50))
    policies = (ADAPTIVE, *_fixed(75, 90, 95), *oldest)
    first, second = (
        Experiment(
            f"{name}-{half}",
            policies,
            ("--trace", *options, "--half", str(half)),
            users=users,
            loads=loads,
            tuned_on=f"{name}-{3 - half}",
        )
        for half in (1, 2)
    )
    return first, second


_CEILING = f"{ADAPTIVE},host.budget=4TiB"
"""As if nothing were ever lost: what remains is computing, GPU memory and the users' pauses."""
_ARRIVAL = f"{ADAPTIVE},levers.admission.mode=off"
_STEADY = ("--for", "30m", "--warmup", "12m")
"""Long enough that the backlog of everybody's first prompt is gone when measuring begins."""
_SHORT = ("--for", "20m", "--warmup", "8m")
_COLD = ("--for", "10m", "--warmup", "3m")
_CHANGE = ("--for", "24m", "--warmup", "6m", "--load", "0.5")
_OPENHANDS = ("--for", "3m", "--warmup", "45s", "--scale", "1/4", "--trace")
_READS = {share: f"{ADAPTIVE},prefill.reads={share}%" for share in (75, 25, 0)}
"""Of a prompt's rows on the host: only what its chunks select, an eighth for each GPU and their
exchange, and none, which nothing can beat (``tests.bench.prefix_reads``)."""
_HOT = (_held(5), _held(2), ADAPTIVE, f"{ADAPTIVE},hot.sharing=marginal-gain")
_SPREAD = ("--curve-spread", "1")

EXPERIMENTS = (
    Experiment(
        "load",
        ("stock", "stock,pools.hisparse=70%", ADAPTIVE, _CEILING),
        ("--trace", _AGENTS, *_STEADY),
        users=(64, 80, 96, 128),
        seeds=3,
        columns=PAIRS,
    ),
    Experiment(
        "engage",
        (_engaged(70, 55), _ARRIVAL),
        ("--trace", _AGENTS, *_STEADY),
        users=(96, 128),
        seeds=2,
    ),
    Experiment(
        "tail",
        ("stock", f"{ADAPTIVE},admission.oldest_share=50%", f"{ADAPTIVE},admission.ageing=4m"),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        seeds=2,
        columns=PAIRS,
    ),
    Experiment(
        "crowded",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--for", "45m", "--warmup", "27m"),
        users=(192,),
        columns=PAIRS,
    ),
    Experiment(
        "split",
        (ADAPTIVE, *_fixed(60, 70, 75, 80, 85, 90, 94, 95, 96, 97, 98)),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        oracle=True,
    ),
    Experiment(
        "split-seeds",
        (ADAPTIVE, *_fixed(80, 85, 90, 94, 96)),
        ("--trace", _AGENTS, *_STEADY),
        users=(128,),
        first_seed=1,
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "split-long",
        (ADAPTIVE, *_fixed(85, 90)),
        ("--trace", _AGENTS, "--for", "72m", "--warmup", "12m"),
        users=(128,),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "openhands",
        ("standard", "stock", ADAPTIVE),
        (*_OPENHANDS, "openhands"),
        users=(8, 16, 24, 32),
        seeds=2,
        columns=STEPS,
    ),
    Experiment(
        "chat",
        (ADAPTIVE, *_fixed(60, 70, 75, 80, 85, 90, 94, 95, 96, 97, 98)),
        ("--trace", _CHAT, *_SHORT),
        loads=(1.0,),
        oracle=True,
    ),
    Experiment(
        "chat-fits",
        (ADAPTIVE, *_fixed(75, 85, 90, 95, 97)),
        ("--trace", _CHAT, *_SHORT),
        loads=(0.5,),
        oracle=True,
    ),
    Experiment(
        "chat-load",
        ("stock", ADAPTIVE, _CEILING),
        ("--trace", _CHAT, *_SHORT),
        loads=(0.5, 1.0, 1.5),
    ),
    Experiment(
        "change",
        (ADAPTIVE, "stock", *_fixed(75, 90, 95, 97)),
        ("--trace", _AGENTS, "--then", _CHAT, *_CHANGE),
        users=(96,),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "change-back",
        (ADAPTIVE, "stock", *_fixed(90, 95)),
        ("--trace", _CHAT, "--then", _AGENTS, *_CHANGE, "--users", "96"),
        seeds=2,
        oracle=True,
    ),
    Experiment(
        "hot", _HOT, (*_OPENHANDS, "openhands", *_SPREAD), users=(16, 32, 48), columns=STEPS
    ),
    Experiment(
        "hot-worse",
        _HOT,
        (*_OPENHANDS, "openhands", *_SPREAD, "--misses", "x1.5", "--union", "x1.5"),
        users=(32,),
        columns=STEPS,
    ),
    Experiment(
        "admission",
        (
            _ARRIVAL,
            ADAPTIVE,
            f"{ADAPTIVE},admission.oldest_share=0%",
            f"{ADAPTIVE},admission.max_waiting_sessions=32,admission.when_full=wait",
            f"{ADAPTIVE},admission.max_waiting_sessions=32,admission.when_full=refuse",
        ),
        ("--trace", _AGENTS, *_SHORT),
        users=(64, 96, 128, 160),
    ),
    Experiment(
        "quarter",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, *_SHORT, "--scale", "1/4"),
        users=(128,),
        columns=PAIRS,
    ),
    Experiment(
        "burst",
        ("stock", ADAPTIVE, _ARRIVAL),
        ("--trace", _AGENTS, "--for", "12m", "--warmup", "10s"),
        users=(96, 128, 192),
        columns=PAIRS,
    ),
    Experiment(
        "copies",
        ("stock", "stock,copies=1", ADAPTIVE, f"{ADAPTIVE},copies=8"),
        ("--trace", _AGENTS, *_SHORT),
        users=(128,),
    ),
    Experiment(
        "store",
        (
            *(ADAPTIVE, f"{ADAPTIVE},offload.policy=arc", f"{ADAPTIVE},offload.threshold=2"),
            f"{ADAPTIVE},offload.prompt_only=true",
        ),
        ("--trace", _AGENTS, *_COLD),
        users=(96,),
    ),
    Experiment(
        "mix",
        ("stock", ADAPTIVE),
        ("--trace", _AGENTS, "--trace", _CHAT, *_COLD),
        users=(96,),
    ),
    *_halves("half-agents", (_AGENTS, *_SHORT), users=(128,)),
    *_halves("half-chat", (_CHAT, *_SHORT), loads=(1.0,)),
    Experiment(
        "prefix-openhands",
        (ADAPTIVE, *_READS.values()),
        (*_OPENHANDS, "openhands"),
        users=(16, 32),
        seeds=2,
        columns=(*STEPS, "unserved"),
    ),
    Experiment(
        "prefix",
        (ADAPTIVE, _READS[25]),
        ("--trace", _AGENTS, "--for", "14m", "--warmup", "6m"),
        users=(96, 128, 64),
        columns=(*MEMORY, "link"),
    ),
    Experiment(
        "openhands-one",
        ("standard", "stock", ADAPTIVE),
        ("--trace", "openhands", "--for", "3m", "--warmup", "45s", "--scale", "1"),
        users=(1,),
        columns=STEPS,
    ),
    Experiment(
        "million",
        ("stock", ADAPTIVE),
        ("--trace", "openhands@1000000", "--for", "20m", "--warmup", "10m", "--scale", "1"),
        users=(8,),
    ),
)


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
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if ended.returncode:
            raise UserError(f"study: {path.stem} ended with exit code {ended.returncode}")
        write_atomically(path, ended.stdout)


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


def markdown(
    experiment: Experiment, results: Sequence[PolicyResult], tuned: Sequence[PolicyResult] = ()
) -> str:
    """The command and its figures; ``tuned`` are results of ``experiment.tuned_on``."""
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
    if tuned:
        lines += ["", judged_elsewhere(experiment.tuned_on, tuned, results)]
    if any(one.settled_s is not None for one in results):
        lines += ["", recovery(results)]
    judged = predictions(results)
    if judged:
        text = f"Expected of moves against what came: {'; '.join(judged)}."
        lines += ["", *textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)]
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


def judged_elsewhere(
    tuned_on: str, tuned: Sequence[PolicyResult], results: Sequence[PolicyResult]
) -> str:
    """The first policy, and the one that was best elsewhere, by the best of these results."""
    chosen = max(tuned, key=lambda one: one.calls).name
    calls = {one.name: one.calls for one in results}
    best = max(calls, key=lambda name: calls[name])
    shares = "; ".join(
        f"`{name}` {calls[name] / max(1, calls[best]):.1%}" for name in (results[0].name, chosen)
    )
    text = f"Best on `{tuned_on}`: `{chosen}`. Here, of the best (`{best}`): {shares}."
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


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
    parser.add_argument("document", nargs="?", type=Path, default=Path("docs/figures/study.md"))
    given = parser.parse_args()
    chosen = [one for one in EXPERIMENTS if not given.only or one.name in given.only]
    if not given.tables:
        run_all(parts(chosen, given.seeds), given.traces, given.data, given.jobs)
    text = given.document.read_text("utf-8")
    for experiment in chosen:
        tuned = [one for one in EXPERIMENTS if one.name == experiment.tuned_on]
        elsewhere = results_of(tuned[0], given.data) if tuned else []
        table = markdown(experiment, results_of(experiment, given.data), elsewhere)
        text = with_table(text, experiment.name, table)
    given.document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
