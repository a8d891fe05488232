"""The `hisparsed simulate` command: runs, then tables, JSON, plots and a report.

The thin shell around the library: everything is checked before the first run starts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.policy.units import counted
from hisparsed.replay.options import parse_duration_s
from hisparsed.simulate.change import after_change
from hisparsed.simulate.display import progress_display
from hisparsed.simulate.folder import REPORT, RESULTS, begin_folder, check_folder
from hisparsed.simulate.measures import Measures
from hisparsed.simulate.options import SimulateOptions, scenarios_of
from hisparsed.simulate.plots import draw_all, require_plots
from hisparsed.simulate.policies import PolicyChoice, choose_policies
from hisparsed.simulate.report import write_report
from hisparsed.simulate.scale_error import ScaleError, error_text, scale_error
from hisparsed.simulate.scenario import Scenario
from hisparsed.simulate.sizes import fitting_sizes
from hisparsed.simulate.summary import Limits, PolicyResult, paired, summarise
from hisparsed.simulate.table import results_text


@dataclass
class _Done:
    """What has finished so far."""

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
            _print(scenarios[0], options, done, error)
        raise
    facts = _print(scenarios[0], options, done, error)
    if options.out is not None:
        _write(options.out, scenarios[0], facts, done, error)


def _print(
    scenario: Scenario, options: SimulateOptions, done: _Done, error: ScaleError | None
) -> list[str]:
    """Returns the sentences on what was simulated."""
    facts = _facts(scenario, options, error)
    if options.as_json:
        document = _document(scenario, done.results, error)
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


def _facts(scenario: Scenario, options: SimulateOptions, error: ScaleError | None) -> list[str]:
    names = ", ".join(one.sessions.name for one in scenario.traffic)
    facts = [
        f"{scenario.node.title}, simulated: {names}, {scenario.duration_s / 60:g} virtual minutes, "
        f"the first {scenario.warmup_s / 60:g} not counted, scale {scenario.scale}, "
        f"{counted(options.seeds, 'seed')} from {options.seed}."
    ]
    if scenario.scale < 1:
        facts.append(
            "Error against the whole node: not measured; --check-scale 10m measures it."
            if error is None
            else error_text(error)
        )
    return facts


def _document(
    scenario: Scenario, results: Sequence[PolicyResult], error: ScaleError | None
) -> dict[str, object]:
    return {
        "node": scenario.node.title,
        "traces": [one.sessions.name for one in scenario.traffic],
        "scale": str(scenario.scale),
        "duration_s": scenario.duration_s,
        "warmup_s": scenario.warmup_s,
        "scale_error": None if error is None else error.model_dump(),
        "policies": [one.model_dump() for one in results],
    }


def _write(
    folder: Path,
    scenario: Scenario,
    facts: Sequence[str],
    done: _Done,
    error: ScaleError | None,
) -> None:
    try:
        plots = draw_all(folder, done.runs, done.results)
        document = json.dumps(_document(scenario, done.results, error), indent=2)
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
