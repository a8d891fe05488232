"""`hisparsed plan` and `hisparsed simulate`: plan a node's sizes and compare policies without
hardware.

Results go to standard output as a table or JSON, progress goes to standard error. Exit code 2 for
wrong input. Imports beyond typer wait until a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    node: Annotated[
        str, typer.Option(help="Node description: a shipped name or a .yaml file.")
    ] = "8xh200-glm-5.3",
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of one request; can be repeated.")
    ] = None,
    multiplier: Annotated[
        float, typer.Option(help="Hot rows of a request as a multiple of top-k.")
    ] = 2.0,
    host_budget: Annotated[
        str | None,
        typer.Option(help="Host memory of both pools, e.g. 512GiB; the node's if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute what fits on a node: concurrency, the limit that binds, memory, the split."""
    from hisparsed.config.node_description import load_node_description
    from hisparsed.plan.sizing import make_plan, parse_budget
    from hisparsed.plan.text import plan_text

    described = load_node_description(node)
    budget = described.host.budget
    if host_budget is not None:
        budget = parse_budget("--host-budget", host_budget)
    longest = described.model.max_model_len
    usual = [tokens for tokens in (8_192, 65_536, 142_000, 262_144) if tokens < longest]
    contexts = context or [*usual, longest]
    found = make_plan(described, contexts, multiplier=multiplier, host_budget=budget)
    typer.echo(found.model_dump_json(indent=2) if as_json else plan_text(found), nl=as_json)


def simulate(
    node: Annotated[
        str, typer.Option(help="Node description: a shipped name or a .yaml file.")
    ] = "8xh200-glm-5.3",
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="Trace file, openhands or openhands@TOKENS; several run side by side. The shipped "
            "one if not given."
        ),
    ] = None,
    then: Annotated[
        str | None, typer.Option(help="Trace that takes over in the middle of the run.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Shipped policy, file, stock, or standard (no HiSparse); ,KEY=VALUE changes it. "
            "Several are compared."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Run the first policy with many values: pools.hisparse=60%..95%:5%, or KEY=A|B|C."
        ),
    ] = None,
    users: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sessions at a time on the whole node; can be repeated."),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(help="Factor for the pace at which recorded sessions start; can be repeated."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="Part of node and sessions that is simulated, e.g. 1/8.")
    ] = "1/8",
    for_: Annotated[str, typer.Option("--for", help="Virtual time, e.g. 30m or 1h.")] = "1h",
    warmup: Annotated[
        str | None, typer.Option(help="Virtual time not counted; a quarter if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="How many seeds; means are shown.")
    ] = 1,
    think_scale: Annotated[
        float, typer.Option(min=0, help="Factor for the recorded pauses inside sessions.")
    ] = 1.0,
    host_budget: Annotated[
        str | None,
        typer.Option(help="Host memory of both pools, e.g. 512GiB; the node's if not given."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="The engine's limit: longer calls are skipped."),
    ] = None,
    prompt_only: Annotated[
        bool, typer.Option("--prompt-only", help="Offload prompts and not answers.")
    ] = False,
    half: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2,
            help="Play only this half of each trace's sessions, families whole: a policy tuned on "
            "one half can be judged on the other.",
        ),
    ] = None,
    misses: Annotated[
        str, typer.Option(help="Factor for the node's misses of hot buffers, e.g. x1.5.")
    ] = "x1",
    union: Annotated[
        str, typer.Option(help="Factor for the union of rows that a step selects, e.g. x1.5.")
    ] = "x1",
    curve_spread: Annotated[
        float | None,
        typer.Option(
            min=0, max=10, help="How much requests differ in their misses; 0: not at all."
        ),
    ] = None,
    ttft_limit: Annotated[
        str, typer.Option(help="A call is good when its first token comes within this.")
    ] = "30s",
    itl_limit: Annotated[
        str, typer.Option(help="And the mean time between its tokens is within this.")
    ] = "100ms",
    check_scale: Annotated[
        str | None,
        typer.Option(help="Also run this long at full scale and print the error, e.g. 10m."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for plots, report.html, results and journals.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Try policies on a simulated node: stock vLLM's scheduler in virtual time."""
    from hisparsed.simulate.command import run_command
    from hisparsed.simulate.scenario import SimulateOptions

    run_command(
        SimulateOptions(
            node=node,
            traces=trace or (),
            then=then,
            policies=policy or ("stock", "policy"),
            sweep=sweep,
            users=users or (),
            loads=load or (),
            scale=scale,
            duration=for_,
            warmup=warmup,
            seed=seed,
            seeds=seeds,
            think_scale=think_scale,
            host_budget=host_budget,
            max_model_len=max_model_len,
            prompt_only=prompt_only,
            half=half,
            misses=misses,
            union=union,
            curve_spread=curve_spread,
            ttft_limit=ttft_limit,
            itl_limit=itl_limit,
            check_scale=check_scale,
            out=out,
            as_json=as_json,
        )
    )
