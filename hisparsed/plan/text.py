"""A plan as text for a terminal. Pure: figures in, lines out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hisparsed.plan.sizing import ContextPlan, Plan
from hisparsed.policy.units import format_bytes

_GIB = 2**30


def plan_text(plan: Plan) -> str:
    """The tables, each under a line that says whose figures it shows."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterable[str]:
    yield plan.node
    yield (
        f"multiplier {plan.multiplier:g}x: {plan.hot_rows} hot rows per request; host budget "
        f"{format_bytes(plan.host_budget)}; at most {plan.max_num_seqs} requests"
    )
    yield _stock_words(plan)
    yield ""
    bytes_ = plan.published
    yield (
        f"vLLM's published calculator ({bytes_.baseline_gpu:,} B per block without HiSparse, "
        f"{bytes_.hisparse_gpu:,} B with, {bytes_.host:,} B on the host):"
    )
    yield from table_lines(
        ("context", "baseline", "by GPU", "by host", "result", "binds"),
        [
            (
                f"{one.context:,}",
                str(one.baseline),
                str(one.hybrid_gpu),
                str(one.hybrid_host),
                str(one.result),
                one.binds,
            )
            for one in plan.contexts
        ],
    )
    yield ""
    real = plan.real
    yield (
        f"What vLLM lays out ({real.hisparse_gpu:,} B per GPU block, {real.host:,} B per host "
        f"block, {real.hot_groups} hot groups), pools at equal reach with one copy:"
    )
    yield from table_lines(
        ("context", "baseline", "by GPU", "by host", "result", "binds", "vLLM logs", "one more x"),
        [_laid_out_row(one) for one in plan.contexts],
    )
    yield ""
    yield "What one session costs, GiB:"
    yield from table_lines(
        ("context", "GPU full", "GPU none", "HiSparse", "offload", "offload, stock"),
        [_session_row(one) for one in plan.contexts],
    )
    yield ""
    yield "Equal reach of the host budget:"
    yield from table_lines(
        ("indexer copies", "HiSparse", "offload", "share", "tokens held"),
        [
            (
                f"{one.copies} (stock vLLM)" if one.copies > 1 else f"{one.copies} (hisparsed)",
                format_bytes(one.hisparse_bytes),
                format_bytes(one.offload_bytes),
                f"{one.hisparse_share:.1%}",
                f"{one.reach_tokens:,}",
            )
            for one in plan.split
        ],
    )


def _stock_words(plan: Plan) -> str:
    words = (
        f"stock vLLM leases {plan.stock_multiplier:g}x here, {plan.least_stock_multiplier:g}x at "
        "least"
    )
    if plan.multiplier < plan.least_stock_multiplier:
        words += f"; {plan.multiplier:g}x is hisparsed's alone, with scratch blocks for the rest"
    return words


def _laid_out_row(one: ContextPlan) -> tuple[str, ...]:
    real = one.laid_out
    return (
        f"{one.context:,}",
        str(real.baseline),
        str(real.hybrid_gpu),
        str(real.hybrid_host),
        str(real.result),
        real.binds,
        f"{real.steady_state:.1f}",
        f"-{one.one_more_x:.1f}",
    )


def _session_row(one: ContextPlan) -> tuple[str, ...]:
    cost = one.session
    sizes = (cost.gpu_full, cost.gpu_none, cost.host, cost.offload, cost.offload_stock)
    return (f"{one.context:,}", *(f"{size / _GIB:.2f}" for size in sizes))


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Right-aligned columns under their heads."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
