"""The `hisparsed simulate` command: options in, runs, then tables, JSON, plots and a report.

The thin shell around the library; a study calls ``run_all`` with scenarios of its own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.errors import UserError
from hisparsed.replay.model import Trace
from hisparsed.replay.options import parse_duration_s, parse_scale
from hisparsed.replay.trace import SHIPPED_TRACE, load_trace
from hisparsed.simulate.change import after_change
from hisparsed.simulate.display import progress_display
from hisparsed.simulate.measures import Measures
from hisparsed.simulate.openhands import is_openhands, openhands_trace
from hisparsed.simulate.plots import draw_all, require_plots
from hisparsed.simulate.policies import (
    PolicyChoice,
    choose_policy,
    parse_budget,
    sweep_policies,
)
from hisparsed.simulate.report import write_report
from hisparsed.simulate.scale_error import ScaleError, error_text, scale_error
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.summary import Limits, PolicyResult, paired, summarise
from hisparsed.simulate.table import results_text
from hisparsed.simulate.variation import parse_factor, varied
from hisparsed.simulate.workload import Sessions

DEFAULT_USERS = 64


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The command's options as typed; texts are parsed here."""

    node: str
    traces: Sequence[str]
    then: str | None
    policies: Sequence[str]
    sweep: str | None
    users: Sequence[int]
    loads: Sequence[float]
    scale: str
    duration: str
    warmup: str | None
    seed: int
    seeds: int
    think_scale: float
    host_budget: str | None
    max_model_len: int | None
    prompt_only: bool
    misses: str
    union: str
    curve_spread: float | None
    ttft_limit: str
    itl_limit: str
    check_scale: str | None
    out: Path | None
    as_json: bool


def run_command(options: SimulateOptions) -> None:
    """Run everything and print it; raises ``UserError`` for what the operator got wrong."""
    policies = [choose_policy(one) for one in options.policies]
    if options.sweep is not None:
        policies += sweep_policies(options.policies[0], options.sweep)
    scenarios = _scenarios(options)
    check_s = None
    if options.check_scale is not None:
        check_s = parse_duration_s("--check-scale", options.check_scale)
    if options.out is not None:
        require_plots()
        options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    logging.getLogger("hisparsed").setLevel(logging.ERROR)
    limits = Limits(
        ttft_s=parse_duration_s("--ttft-limit", options.ttft_limit),
        itl_s=parse_duration_s("--itl-limit", options.itl_limit),
    )
    results, runs = _run_all(options, policies, scenarios, limits)
    error = None
    if check_s is not None:
        error = _check_scale(scenarios[0], policies[0], options.seed, check_s, limits)
    facts = _facts(scenarios[0], options, error)
    if options.as_json:
        print(json.dumps(_document(scenarios[0], results, error), indent=2))  # noqa: T201
    else:
        print("\n".join([*facts, ""]))  # noqa: T201
        print(results_text(results), end="")  # noqa: T201
    if options.out is not None:
        _write(options.out, scenarios[0], facts, results, runs, error)


def _scenarios(options: SimulateOptions) -> list[Scenario]:
    """One for each number of users, or for each pace where sessions start as the trace says."""
    node = varied(
        load_node_description(options.node),
        misses=parse_factor("--misses", options.misses),
        union=parse_factor("--union", options.union),
        spread=options.curve_spread,
    )
    duration_s = parse_duration_s("--for", options.duration)
    warmup_s = duration_s / 4
    if options.warmup is not None:
        warmup_s = parse_duration_s("--warmup", options.warmup)
    scenario = Scenario(
        node=node,
        traffic=(),
        host_budget=_budget(options.host_budget, node),
        scale=parse_scale(options.scale),
        duration_s=duration_s,
        warmup_s=warmup_s,
        think_scale=options.think_scale,
        offload_prompt_only=options.prompt_only,
        max_model_len=options.max_model_len,
    )
    for load in options.loads:
        if not 0 < load < math.inf:
            raise UserError(f"--load: {load:g} is not right; need a number above 0")
    if scenario.scale > 1:
        raise UserError(f"--scale: {options.scale} is more than the whole node; need at most 1")
    traces = [_trace(name) for name in options.traces or [str(SHIPPED_TRACE)]]
    after = None if options.then is None else _trace(options.then)
    tokens, longest = node.engine.block_tokens, options.max_model_len
    sessions = [Sessions(trace, tokens, longest) for trace in traces]
    then = None if after is None else Sessions(after, tokens, longest)
    recorded = any(one.has_starts for one in sessions) and not options.users
    counts = [None] if recorded else list(options.users or [DEFAULT_USERS])
    return [
        replace(scenario, traffic=_traffic(sessions, then, users, load, duration_s))
        for users in counts
        for load in options.loads or [1.0]
    ]


def _traffic(
    sessions: Sequence[Sessions],
    then: Sessions | None,
    users: int | None,
    load: float,
    duration_s: float,
) -> tuple[Traffic, ...]:
    """``users`` shared evenly among the traces; ``then`` takes over at half time."""
    change_s = math.inf if then is None else duration_s / 2
    each = None if users is None else max(1, users // len(sessions))
    found = [
        Traffic(one, None if one.has_starts else each or DEFAULT_USERS, load, 0.0, change_s)
        for one in sessions
    ]
    if then is not None:
        own = None if then.has_starts else users or DEFAULT_USERS
        found.append(Traffic(then, own, load, change_s))
    return tuple(found)


def _trace(name: str) -> Trace:
    return openhands_trace(name) if is_openhands(name) else load_trace(Path(name))


def _budget(text: str | None, node: NodeDescription) -> int:
    return node.host.budget if text is None else parse_budget("--host-budget", text)


def _run_all(
    options: SimulateOptions,
    policies: Sequence[PolicyChoice],
    scenarios: Sequence[Scenario],
    limits: Limits,
) -> tuple[list[PolicyResult], dict[str, Measures]]:
    """Results in order, and the runs of the first seed by label."""
    from hisparsed.simulate.run import run_policy

    results: list[PolicyResult] = []
    runs: dict[str, Measures] = {}
    first: dict[int, Measures] = {}
    seeds = range(options.seed, options.seed + options.seeds)
    count = len(policies) * len(scenarios) * len(seeds)
    with (
        tempfile.TemporaryDirectory(prefix="hisparsed-simulate-") as work,
        progress_display(sys.stderr, count, scenarios[0].duration_s) as display,
    ):
        for number, (scenario, policy) in enumerate(
            (scenario, policy) for scenario in scenarios for policy in policies
        ):
            base = number % len(policies) == 0
            for seed in seeds:
                label = scenario_label(scenario, policy, len(scenarios))
                display.begin(f"{label}, seed {seed}")
                journal = None
                if options.out is not None and seed == seeds[0]:
                    journal = options.out / f"journal-{number}"
                measures = run_policy(
                    scenario,
                    policy,
                    seed,
                    work_folder=Path(work),
                    journal_folder=journal,
                    progress=display.at,
                )
                runs.setdefault(label, measures)
                if base:
                    first[seed] = measures
                result = _summary(scenario, policy, seed, measures, limits)
                result = paired(result, measures, first[seed])
                if options.then is not None:
                    change_s, scale = scenario.duration_s / 2, float(scenario.scale)
                    result = after_change(result, measures, change_s, scale)
                results.append(result)
    return results, runs


def scenario_label(scenario: Scenario, policy: PolicyChoice, scenarios: int) -> str:
    if scenarios == 1:
        return policy.name
    traffic = scenario.traffic[0]
    pace = f"load {traffic.load:g}" if traffic.users is None else f"{traffic.users} users"
    return f"{policy.name}, {pace}"


def _summary(
    scenario: Scenario, policy: PolicyChoice, seed: int, measures: Measures, limits: Limits
) -> PolicyResult:
    first = scenario.traffic[0]
    return summarise(
        policy.name,
        first.users,
        seed,
        measures,
        scale=scenario.scale,
        copy_bandwidth=scenario.node.gpu.copy_bandwidth,
        limits=limits,
        trace_load=first.load if first.users is None else None,
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
        f"{options.seeds} seed{'s' if options.seeds > 1 else ''} from {options.seed}."
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
    results: Sequence[PolicyResult],
    runs: dict[str, Measures],
    error: ScaleError | None,
) -> None:
    plots = draw_all(folder, runs, results)
    document = json.dumps(_document(scenario, results, error), indent=2)
    (folder / "results.json").write_text(document + "\n", "utf-8")
    write_report(
        folder / "report.html",
        title=f"hisparsed simulate: {scenario.node.title}",
        facts=facts,
        results=results,
        runs=runs,
        plots=plots,
    )
    print(f"Report: {folder / 'report.html'}", file=sys.stderr)  # noqa: T201
