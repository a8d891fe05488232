"""`hisparsed plan`: what fits on a node, in a second, without the node.

Options in, a table or JSON on standard output; exit code 2 for wrong input.
"""

from typing import Annotated

import typer


def plan(
    node: Annotated[
        str, typer.Option(help="Node description: a shipped name or a .yaml file.")
    ] = "8xh200-glm-5.3",
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of one request; may be given several times.")
    ] = None,
    multiplier: Annotated[
        float, typer.Option(help="Hot rows of a request as a multiple of top-k.")
    ] = 2.0,
    host_budget: Annotated[
        str | None, typer.Option(help="Host memory of both pools, e.g. 512GiB; the node's if not.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what fits on a node: concurrency, the limit that binds, memory, the split."""
    from hisparsed.config.node_description import load_node_description
    from hisparsed.plan.budget import parse_budget
    from hisparsed.plan.document import make_plan
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
