"""How results are shown: a table for a terminal, plots as PNG files, one HTML report.

The table puts policies side by side and the seeds of one policy together. Plots need matplotlib,
the `plots` extra. The HTML file loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import html
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hisparsed.errors import UserError
from hisparsed.plan.text import table_lines
from hisparsed.policy.forecasts import error_shares
from hisparsed.simulate.results import Measures, PolicyResult, Sample, quantile

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
    "core",
    "moves",
)


def grouped(results: Sequence[PolicyResult]) -> list[list[PolicyResult]]:
    """Results of one policy and one number of users or pace together, in the order of the first."""
    groups: dict[tuple[str, int | None, float | None], list[PolicyResult]] = {}
    for one in results:
        groups.setdefault((one.name, one.users, one.trace_load), []).append(one)
    return list(groups.values())


def rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """Under ``HEADS``: means over the seeds, waits over all calls, the range of calls per hour."""
    return [_row(group) for group in grouped(results)]


def results_text(results: Sequence[PolicyResult], width: int | None = None) -> str:
    """One table, or several below each other where a terminal of ``width`` columns asks for it."""
    cells = rows(results)
    lines = list(table_lines(HEADS, cells))
    if width is not None and max(map(len, lines)) > width:
        lines = _below_each_other(cells, width)
    judged = predictions(results)
    if judged:
        lines += ["", "Expected of moves against what came:", *(f"  {one}" for one in judged)]
    return "\n".join(lines) + "\n"


def predictions(results: Sequence[PolicyResult]) -> list[str]:
    """Errors of each policy's predictions over all its runs; a line for each lever and figure."""
    lines = []
    for name in dict.fromkeys(one.name for one in results):
        verdicts = [
            (share.lever, {share.figure: error})
            for one in results
            if one.name == name
            for share in one.predictions
            for error in share.errors
        ]
        lines += [f"{name}: {share.text}" for share in error_shares(verdicts)]
    return lines


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
    """Of the values that exist."""
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
        f"{mean('core_use'):.0%}",
        f"{mean('moves'):.0f}",
    )


PLOT_FILES = ("pools.png", "reach.png", "hits.png", "concurrency.png", "interactivity.png")
_POINTS = 400
"""A line of a plot shows no more."""

Runs = Mapping[str, Measures]


def require_plots() -> None:
    """Raises ``UserError`` where matplotlib is not installed, before anything is simulated."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--out draws plots with matplotlib; pip install 'hisparsed[plots]'")


def draw_all(folder: Path, runs: Runs, results: Sequence[PolicyResult]) -> list[Path]:
    """All plots of the runs, by label, as PNG files in ``folder``."""
    draws: list[Callable[[Any], None]] = [
        lambda axes: _pools(axes, runs),
        lambda axes: _reach(axes, runs),
        lambda axes: draw_hits(axes, runs),
        lambda axes: _concurrency(axes, runs),
        lambda axes: _interactivity(axes, results),
    ]
    return [_figure(folder / name, draw) for name, draw in zip(PLOT_FILES, draws, strict=True)]


def _figure(path: Path, draw: Callable[[Any], None]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    # No date and no version of the library in the file: equal runs give equal files.
    figure.savefig(path, metadata={"Software": None})
    return path


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples[:: max(1, len(samples) // _POINTS)]


def _line(axes: Any, runs: Runs, value: Callable[[Sample], float], **style: Any) -> None:
    for number, (label, run) in enumerate(runs.items()):
        samples = _thinned(run.samples)
        minutes = [one.at_s / 60 for one in samples]
        axes.plot(
            minutes,
            [value(one) for one in samples],
            color=f"C{number}",
            **{"label": label, **style},
        )
    axes.set_xlabel("virtual minutes")


def _pools(axes: Any, runs: Runs) -> None:
    axes.set_title("Offload pool's share of the host budget")
    _line(axes, runs, _offload_share)
    axes.set_ylabel("%")
    axes.set_ylim(bottom=0)


def _offload_share(one: Sample) -> float:
    return 100 * one.offload_blocks / max(1, one.offload_blocks + one.hisparse_blocks)


def _reach(axes: Any, runs: Runs) -> None:
    axes.set_title("Reach of both pools (solid HiSparse, dashed offload) and live set (dotted)")
    _line(axes, runs, lambda one: one.hisparse_reach_tokens / 1e6)
    _line(axes, runs, lambda one: one.offload_reach_tokens / 1e6, linestyle="--", label=None)
    _line(axes, runs, lambda one: one.live_tokens / 1e6, linestyle=":", label=None)
    axes.set_ylabel("million tokens")
    axes.set_ylim(bottom=0)


def draw_hits(axes: Any, runs: Runs) -> None:
    """On matplotlib's ``axes``."""
    axes.set_title("Prompt tokens found in the caches")
    for number, (label, run) in enumerate(runs.items()):
        # By minute; a short run is cut into ten.
        marks = run.samples[:: max(1, min(60, len(run.samples) // 10))]
        points = [
            (after.at_s / 60, 100 * (after.hit_tokens - before.hit_tokens) / prompt)
            for before, after in pairwise(marks)
            if (prompt := after.prompt_tokens - before.prompt_tokens) > 0
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=f"C{number}")
    axes.set_xlabel("virtual minutes")
    axes.set_ylabel("%")
    axes.set_ylim(0, 100)


def _concurrency(axes: Any, runs: Runs) -> None:
    axes.set_title("Requests running (solid) and waiting (dotted)")
    _line(axes, runs, lambda one: one.running)
    _line(axes, runs, lambda one: one.waiting, linestyle=":", label=None)
    axes.set_ylabel("requests, of the scaled node")
    axes.set_ylim(bottom=0)


def _interactivity(axes: Any, results: Sequence[PolicyResult]) -> None:
    axes.set_title("Interactivity and throughput")
    curves: dict[str, list[tuple[float, float]]] = {}
    for group in grouped(results):
        itl_s = sum(one.itl_p50_s or 0.0 for one in group) / len(group)
        tokens = sum(one.throughput for one in group) / len(group)
        if itl_s > 0:
            curves.setdefault(group[0].name, []).append((1 / itl_s, tokens))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("tokens per second of one user (median)")
    axes.set_ylabel("output tokens per second of the node")


_MOST_SENTENCES = 60
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { text-align: right; padding: .25em .6em; border-bottom: 1px solid #ccc }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto }
li { margin: .2em 0 }
"""


def write_report(
    path: Path,
    *,
    title: str,
    facts: Sequence[str],
    results: Sequence[PolicyResult],
    runs: Mapping[str, Measures],
    plots: Sequence[Path],
) -> None:
    """``facts`` are sentences on what was simulated; ``plots`` are PNG files."""
    lines = _document(title, facts, results, runs, plots)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _document(
    title: str,
    facts: Sequence[str],
    results: Sequence[PolicyResult],
    runs: Mapping[str, Measures],
    plots: Sequence[Path],
) -> Iterator[str]:
    yield "<!doctype html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    yield f"<style>{_STYLE}</style></head><body>"
    yield f"<h1>{html.escape(title)}</h1>"
    for fact in facts:
        yield f"<p>{html.escape(fact)}</p>"
    yield "<table><tr>" + "".join(f"<th>{head}</th>" for head in HEADS) + "</tr>"
    for row in rows(results):
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"
    for one in predictions(results):
        yield f"<p>Expected of moves against what came: {html.escape(one)}</p>"
    for plot in plots:
        data = base64.b64encode(plot.read_bytes()).decode("ascii")
        yield f'<p><img alt="{plot.stem}" src="data:image/png;base64,{data}"></p>'
    for label, run in runs.items():
        if not run.sentences:
            continue
        yield f"<h2>What {html.escape(label)} did</h2><ul>"
        for at_s, sentence in run.sentences[:_MOST_SENTENCES]:
            yield f"<li>{at_s:.0f} s: {html.escape(sentence)}</li>"
        left = len(run.sentences) - _MOST_SENTENCES
        if left > 0:
            yield f"<li>and {left} more, in the journal</li>"
        yield "</ul>"
    yield "</body></html>"
