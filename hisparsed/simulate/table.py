"""Results of a simulation as a table for a terminal: policies side by side, seeds together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hisparsed.plan.text import table_lines
from hisparsed.simulate.summary import PolicyResult, quantile

HEADS = (
    "policy",
    "users",
    "sessions",
    "calls/h",
    "spread",
    "tok/s",
    "good/h",
    "hit",
    "recomputed",
    "preempted",
    "running",
    "TTFT p50",
    "p99",
    "unserved",
    "p99 of both",
    "ITL",
    "load",
    "link",
    "moves",
)


def grouped(results: Sequence[PolicyResult]) -> list[list[PolicyResult]]:
    """Results of one policy and one number of users or pace together, in the order of the first."""
    groups: dict[tuple[str, int | None, float | None], list[PolicyResult]] = {}
    for one in results:
        groups.setdefault((one.name, one.users, one.trace_load), []).append(one)
    return list(groups.values())


def rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """Under ``HEADS``: means over the seeds, waits over all calls, the range of calls an hour."""
    return [_row(group) for group in grouped(results)]


def results_text(results: Sequence[PolicyResult], width: int | None = None) -> str:
    """One table, or several below each other where a terminal of ``width`` columns asks for it."""
    cells = rows(results)
    lines = list(table_lines(HEADS, cells))
    if width is not None and max(map(len, lines)) > width:
        lines = _below_each_other(cells, width)
    return "\n".join(lines) + "\n"


def _below_each_other(cells: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Policies by number, and as many columns in each table as fit."""
    names = list(dict.fromkeys(row[0] for row in cells))
    lines = [f"  {number}  {name}" for number, name in enumerate(names, 1)]
    columns = list(zip(HEADS, *cells, strict=True))
    numbers = ("#", *(str(1 + names.index(row[0])) for row in cells))
    keys, rest = [numbers, columns[1]], columns[2:]
    while rest:
        shown = [rest.pop(0)]
        while rest and _width([*keys, *shown, rest[0]]) <= width:
            shown.append(rest.pop(0))
        heads, *body = zip(*keys, *shown, strict=True)
        lines += ["", *table_lines(heads, body)]
    return lines


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(2 + max(map(len, column)) for column in columns)


def traffic_text(result: PolicyResult) -> str:
    """Users, how fast a recorded trace was played, or both."""
    pace = "trace" if result.trace_load is None else f"trace x{result.trace_load:g}"
    if result.users is None:
        return pace
    return str(result.users) if result.trace_load is None else f"{result.users}, {pace}"


def _both(group: Sequence[PolicyResult]) -> str:
    """The p99 of calls that the first policy finished too, here and there, and how many."""
    calls = sum(one.paired_calls for one in group)
    if not calls:
        return "-"
    own = _quantile(0.99, *(one.paired_ttft_s for one in group))
    base = _quantile(0.99, *(one.base_ttft_s for one in group))
    return f"{own:.0f}s / {base:.0f}s of {calls}"


def _mean_of(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Of those that there are."""
    known = [one for one in values if one is not None]
    return text(sum(known) / len(known)) if known else "-"


def _quantile(share: float, *runs: Sequence[float]) -> float:
    """Over the calls of all runs."""
    return quantile(sorted(one for run in runs for one in run), share)


def _row(group: Sequence[PolicyResult]) -> tuple[str, ...]:
    def mean(name: str) -> float:
        return float(sum(getattr(one, name) for one in group)) / len(group)

    hits, recomputed = mean("prefix_hit_tokens"), mean("recomputed_tokens")
    waits = [one.ttft_s for one in group]
    rates = [one.calls_per_hour for one in group]
    spread = f"{min(rates):,.0f}-{max(rates):,.0f}" if len(group) > 1 else "-"
    return (
        group[0].name,
        traffic_text(group[0]),
        f"{mean('sessions'):.0f}",
        f"{mean('calls_per_hour'):,.0f}",
        spread,
        f"{mean('throughput'):,.0f}",
        f"{mean('goodput'):,.0f}",
        f"{hits / (hits + recomputed):.1%}" if hits + recomputed else "-",
        f"{recomputed / 1e6:.2f}M",
        f"{mean('preemptions'):.0f}",
        f"{mean('occupancy'):.1f}",
        f"{_quantile(0.5, *waits):.1f}s" if any(waits) else "-",
        f"{_quantile(0.99, *waits):.0f}s" if any(waits) else "-",
        f"{max(one.unserved_s for one in group):.0f}s",
        _both(group),
        _mean_of([one.itl_p50_s for one in group], lambda itl_s: f"{itl_s * 1e3:.0f}ms"),
        _mean_of([one.load for one in group], lambda load: f"{load:.2f}"),
        f"{mean('link_use'):.0%}",
        f"{mean('moves'):.0f}",
    )
