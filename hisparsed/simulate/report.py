"""One HTML file of a simulation: figures, plots and moves, with nothing to load from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hisparsed.simulate.measures import Measures
from hisparsed.simulate.summary import PolicyResult
from hisparsed.simulate.table import HEADS, rows

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
