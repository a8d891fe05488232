"""The demo's report: one HTML file with the figures, plots of both nodes, and the decisions.

Everything is in the file: it asks no network for anything. Pure but for ``write_report``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hisparsed.demo.chart import Series, chart
from hisparsed.demo.summary import Comparison, NodeRun, conclusion, table_rows
from hisparsed.errors import UserError
from hisparsed.replay.results import CallResult

_WINDOWS = 14
"""Parts of the time over which shares are taken."""

_STYLE = """
:root { --ink: #1b1f24; --dim: #626a73; --rule: #d8dee4; --paper: #ffffff;
  --c0: #0b6bcb; --c1: #c4511d; --c2: #2c8a4b; --c3: #7a5cc4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --dim: #9aa4ae; --rule: #343b43; --paper: #14171a;
    --c0: #5aa9f5; --c1: #f08a5b; --c2: #62c583; --c3: #ad95ef; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1300px; margin: 2em auto; padding: 0 1.2em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1.2em; }
svg { width: 100%; font: 12px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 13px; fill: var(--ink); }
svg .tick { fill: var(--dim); } svg .grid { stroke: var(--rule); }
svg .line { fill: none; stroke-width: 1.8; } svg .dot { fill-opacity: 0.7; }
svg .line.c0 { stroke: var(--c0); } svg .dot.c0 { fill: var(--c0); }
svg .line.c1 { stroke: var(--c1); } svg .dot.c1 { fill: var(--c1); }
svg .line.c2 { stroke: var(--c2); } svg .line.c3 { stroke: var(--c3); }
table { border-collapse: collapse; } th, td { padding: 0.25em 0.9em 0.25em 0; text-align: left;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.note { color: var(--dim); }
"""


def default_path() -> Path:
    """A new file in the folder for temporary files."""
    handle, name = tempfile.mkstemp(prefix="hisparsed-demo-", suffix=".html")
    os.close(handle)
    return Path(name)


def require_writable(path: Path) -> None:
    """Raise ``UserError`` when the file cannot be written; an existing one stays as it is."""
    _write(path, "a", "")


def write_report(comparison: Comparison, path: Path) -> None:
    """Raises ``UserError`` when the file cannot be written."""
    _write(path, "w", report_page(comparison))


def _write(path: Path, mode: str, text: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--report: cannot write {path}: {error.strerror}") from error


def report_page(comparison: Comparison) -> str:
    """The whole HTML document."""
    sizing = comparison.sizing
    conclusions = "".join(f"<p>{escape(line)}</p>" for line in conclusion(comparison))
    charts = "\n".join(f"<div>{one}</div>" for one in _charts(comparison))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hisparsed demo</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>hisparsed demo</h1>
{conclusions}
<p class="note">Two reference nodes on one machine, at the same time and with the same calls: one
with the policy on, one with it off. {sizing.concurrency} recorded coding sessions at a time, a live
set of {sizing.load:.1f} times the reach at the start, {sizing.calls} calls after the first of each
session; each node computed {sizing.tokens_per_s:,.0f} prompt tokens a second beside the other.
Times count from the first of these calls. The node that is done first leaves the machine to the
other, so the longer time would be longer still on a machine of its own.</p>
<table>{_table(comparison)}</table>
<h2>Over time</h2>
<div class="charts">{charts}</div>
<h2>Decisions of the policy</h2>
<table>{_decisions(comparison)}</table>
</body></html>
"""


def _table(comparison: Comparison) -> str:
    head = '<tr><th></th><th class="number">policy on</th><th class="number">policy off</th></tr>'
    return head + "".join(
        f'<tr><td>{escape(label)}</td><td class="number">{escape(on)}</td>'
        f'<td class="number">{escape(off)}</td></tr>'
        for label, on, off in table_rows(comparison)
    )


def _decisions(comparison: Comparison) -> str:
    moves = sorted(comparison.on.decisions, key=lambda one: (one.at_unix_s, one.lever))
    if not moves:
        return "<tr><td>None: nothing had to move.</td></tr>"
    return "<tr><th>second</th><th>lever</th><th>reason</th><th>what and why</th></tr>" + "".join(
        f'<tr><td class="number">{one.at_unix_s - comparison.began_unix_s:.0f}</td>'
        f"<td>{escape(one.lever)}</td><td>{escape(one.code)}</td>"
        f"<td>{escape(one.sentence)}</td></tr>"
        for one in moves
    )


def _charts(comparison: Comparison) -> Iterator[str]:
    runs = (("policy on", comparison.on, 0), ("policy off", comparison.off, 1))
    began = comparison.began_unix_s

    longest_s = max(run.result.seconds for _, run, _ in runs)

    def seconds(title: str, series: Iterable[Series], y_unit: str) -> str:
        return chart(title, series, x_unit="seconds", y_unit=y_unit, x_most=longest_s)

    yield seconds(
        "Calls answered", (Series(n, _answered(run), c) for n, run, c in runs), "calls so far"
    )
    yield seconds(
        "Prompt tokens found in the pools",
        (Series(name, _hit_shares(run), colour) for name, run, colour in runs),
        "% of prompt tokens",
    )
    yield seconds(
        "Wait of each call for its first token, by when it was sent",
        (Series(name, _waits(run), colour, dots=True) for name, run, colour in reversed(runs)),
        "seconds",
    )
    yield seconds(
        "Waiting calls",
        (
            Series(name, _column(run, "observed.requests.waiting", began), colour)
            for name, run, colour in runs
        ),
        "calls",
    )
    yield seconds(
        "Host memory of both pools",
        (
            Series(f"{pool}, {name}", _memory_mib(run, pool, began), colour, dashed=off)
            for pool, colour in (("hisparse", 2), ("offload", 3))
            for name, run, off in (("on", comparison.on, False), ("off", comparison.off, True))
        ),
        "MiB",
    )
    yield seconds(
        "Idle prefix that both pools can hold",
        (Series(name, _smaller_reach(run, began), colour) for name, run, colour in runs),
        "tokens",
    )


def _answered_calls(run: NodeRun) -> list[CallResult]:
    return [call for call in run.result.calls if call.error is None]


def _answered(run: NodeRun) -> list[tuple[float, float]]:
    ends = sorted(call.started_s + call.seconds for call in _answered_calls(run))
    return [(0.0, 0.0), *((end, number) for number, end in enumerate(ends, start=1))]


def _hit_shares(run: NodeRun) -> list[tuple[float, float]]:
    """In equal windows; a call counts where its first token came, and a window without any
    has no point."""
    width = run.result.seconds / _WINDOWS
    windows: dict[int, list[CallResult]] = {}
    for call in _answered_calls(run):
        at_s = call.started_s + (call.ttft_s or 0.0)
        windows.setdefault(min(_WINDOWS - 1, int(at_s / width)), []).append(call)
    return [
        ((number + 0.5) * width, 100 * _hits(calls) / sum(call.prompt_tokens for call in calls))
        for number, calls in sorted(windows.items())
    ]


def _hits(calls: Sequence[CallResult]) -> int:
    return sum(call.prefix_hit_tokens or 0 for call in calls)


def _waits(run: NodeRun) -> list[tuple[float, float]]:
    calls = (call for call in _answered_calls(run) if call.ttft_s is not None)
    return sorted((call.started_s, call.ttft_s or 0.0) for call in calls)


def _memory_mib(run: NodeRun, pool: str, began_unix_s: float) -> list[tuple[float, float]]:
    points = _column(run, f"derived.pools.{pool}.capacity_bytes", began_unix_s)
    return [(x, y / (1 << 20)) for x, y in points]


def _smaller_reach(run: NodeRun, began_unix_s: float) -> list[tuple[float, float]]:
    hisparse, offload = (
        _column(run, f"derived.pools.{pool}.reach_tokens", began_unix_s)
        for pool in ("hisparse", "offload")
    )
    return [(x, min(y, other)) for (x, y), (_, other) in zip(hisparse, offload, strict=True)]


def _column(run: NodeRun, name: str, began_unix_s: float) -> list[tuple[float, float]]:
    """A column of the node's history while the compared calls ran."""
    columns: list[str] = run.history["columns"]
    rows: list[list[Any]] = run.history["rows"]
    if name not in columns:
        return []
    place = columns.index(name)
    points = ((row[0] - began_unix_s, row[place]) for row in rows if row[place] is not None)
    return [(x, y) for x, y in points if 0 <= x <= run.result.seconds]
