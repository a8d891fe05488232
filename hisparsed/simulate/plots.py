"""Plots of simulated runs as PNG files, by matplotlib (the `plots` extra). Judges nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hisparsed.errors import UserError
from hisparsed.simulate.measures import Measures, Sample
from hisparsed.simulate.summary import PolicyResult
from hisparsed.simulate.table import grouped

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
    axes.set_xlabel("tokens a second of one user (median)")
    axes.set_ylabel("output tokens a second of the node")
