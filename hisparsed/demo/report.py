"""The demo's report: one HTML file with the figures, charts of both nodes, and the decisions.

The file holds all that it shows and loads nothing. Pure but for the writing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from hisparsed.demo.chart import Series, chart
from hisparsed.demo.summary import Comparison, NodeRun, conclusion, table_rows
from hisparsed.errors import UserError
from hisparsed.replay.results import CallResult

_WINDOWS = 20
"""Parts of the longer run over which shares are taken."""

_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --dim: #5c646d; --rule: #d8dee4; --paper: #ffffff;
  --c0: #0b6bcb; --c1: #c4511d; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e6e8eb; --dim: #9aa4ae; --rule: #343b43; --paper: #14171a;
    --c0: #5aa9f5; --c1: #f08a5b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1300px; margin: 1.5em auto; padding: 0 1.2em; }
p { max-width: 50em; margin: 0.5em 0; }
h2 { margin: 1.4em 0 0.4em; font-size: 1.25em; }
.result { font-size: 1.25em; font-weight: 600; }
.note { color: var(--dim); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(470px, 100%), 1fr));
  gap: 1.4em 2em; }
figure { margin: 0; display: flex; flex-direction: column; justify-content: end; }
figcaption { font-size: 0.87em; display: flex; flex-wrap: wrap; gap: 0 1em; }
figcaption b { flex-basis: 100%; }
.key { white-space: nowrap; color: var(--dim); }
.key::before { content: ""; display: inline-block; width: 20px; margin-right: 6px;
  vertical-align: middle; border-top: 3px solid; }
.key.c1::before { border-top-width: 2px; }
.key.dashed::before { border-top-style: dashed; }
.key.dots::before { width: 0; border: 3px solid; border-radius: 50%; }
.key.c0::before { border-color: var(--c0); } .key.c1::before { border-color: var(--c1); }
svg { display: block; width: 100%; font: 12px system-ui, sans-serif; }
.tick { fill: var(--dim); } .grid { stroke: var(--rule); }
.line { fill: none; stroke-linejoin: round; } .dot { fill-opacity: 0.7; }
.line.c0 { stroke: var(--c0); stroke-width: 2.4; } .dot.c0 { fill: var(--c0); }
.line.c1 { stroke: var(--c1); stroke-width: 1.4; } .dot.c1 { fill: var(--c1); }
table { border-collapse: collapse; }
th, td { padding: 0.25em 1em 0.25em 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
@media (max-width: 640px) {
  svg { font-size: 18px; }
  .decisions thead { display: none; }
  .decisions tr { display: block; padding: 0.4em 0; border-bottom: 1px solid var(--rule); }
  .decisions td { display: inline-block; padding: 0 0.8em 0 0; border: 0; }
  .decisions td:last-child { display: block; } }
@media print {
  body { font-size: 11px; max-width: none; margin: 0; padding: 0; }
  svg { font-size: 15px; }
  .columns { grid-template-columns: 1fr 1fr; }
  h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
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
    result, *more = conclusion(comparison)
    began = datetime.fromtimestamp(comparison.began_unix_s, UTC)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<title>hisparsed demo, {began:%Y-%m-%d %H:%M} UTC</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body>
<h1>hisparsed demo</h1>
<p class="result">{escape(result)}</p>
{"".join(f"<p>{escape(line)}</p>" for line in more)}
<div class="columns">
<section><h2>Result</h2><table>{_table(comparison)}</table></section>
<section><h2>Setup</h2><table>{_setup(comparison, began)}</table></section>
</div>
<h2>Over time</h2>
<p class="note">Time is counted from the first compared call. A line ends when its node has answered
all calls. From then on the other node has the machine to itself, and runs faster than before.</p>
<div class="columns">
{chr(10).join(_charts(comparison))}
</div>
<h2>Decisions of the policy</h2>
{_decisions(comparison)}
</body></html>
"""


def _table(comparison: Comparison) -> str:
    head = '<tr><th></th><th class="number">policy on</th><th class="number">policy off</th></tr>'
    return head + "".join(
        f'<tr><td>{escape(label)}</td><td class="number">{escape(on)}</td>'
        f'<td class="number">{escape(off)}</td></tr>'
        for label, on, off in table_rows(comparison)
    )


def _setup(comparison: Comparison, began: datetime) -> str:
    sizing, origin = comparison.sizing, comparison.origin
    rows = (
        ("started", f"{began:%Y-%m-%d %H:%M:%S} UTC"),
        ("machine", origin.machine),
        ("software", origin.software),
        (
            "nodes",
            "two reference nodes, one with the policy on and one with it off, that run at "
            "the same time and get the same calls",
        ),
        ("model", origin.model),
        (
            "load",
            f"{sizing.concurrency} recorded coding sessions at a time, a live set of "
            f"{sizing.load:.1f} times the reach at the start; {sizing.calls:,} calls to each node "
            "after the first call of each session",
        ),
        (
            "speed",
            f"{sizing.tokens_per_s:,.0f} prompt tokens per second on each node while both run",
        ),
    )
    return "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows)


def _decisions(comparison: Comparison) -> str:
    moves = sorted(comparison.on.decisions, key=lambda one: (one.at_unix_s, one.lever))
    if not moves:
        return "<p>None: nothing had to move.</p>"
    head = '<th class="number">time</th><th>lever</th><th>reason</th><th>decision</th>'
    rows = "".join(
        f'<tr><td class="number">{_at(one.at_unix_s - comparison.began_unix_s)}</td>'
        f"<td>{escape(one.lever)}</td><td>{escape(one.code)}</td>"
        f"<td>{escape(one.sentence)}</td></tr>\n"
        for one in moves
    )
    return f'<table class="decisions"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _at(seconds: float) -> str:
    return "before" if seconds < 0 else f"{seconds:.0f} s"


def _charts(comparison: Comparison) -> Iterator[str]:
    runs = (("policy on", comparison.on, 0), ("policy off", comparison.off, 1))
    began = comparison.began_unix_s
    longest_s = max(run.result.seconds for _, run, _ in runs)
    window_s = longest_s / _WINDOWS

    def over_time(title: str, series: Iterable[Series], y_unit: str, y_most: float = 0.0) -> str:
        return chart(title, series, x_unit="s", y_unit=y_unit, x_most=longest_s, y_most=y_most)

    yield over_time("Calls answered", (Series(n, _answered(run), c) for n, run, c in runs), "calls")
    yield over_time(
        f"Prefix hits, in windows of {window_s:.2g} s",
        (Series(name, _hit_shares(run, window_s), colour) for name, run, colour in runs),
        "% of prompt tokens",
        y_most=100.0,
    )
    yield over_time(
        "Time to first token of each call, by the time it was sent",
        (Series(name, _waits(run), colour, dots=True) for name, run, colour in runs),
        "seconds",
    )
    yield over_time(
        "Waiting calls",
        (
            Series(name, _column(run, "observed.requests.waiting", began), colour)
            for name, run, colour in runs
        ),
        "calls",
    )
    yield over_time(
        "Host memory of each pool",
        (
            Series(f"{pool}, {name}", _memory_mib(run, key, began), colour, dashed=dashed)
            for pool, key, dashed in (("HiSparse", "hisparse", False), ("offload", "offload", True))
            for name, run, colour in runs
        ),
        "MiB",
    )
    yield over_time(
        "Reach of the smaller pool: the idle prefix that both pools can hold",
        (Series(name, _smaller_reach(run, began), colour) for name, run, colour in runs),
        "tokens",
    )


def _answered_calls(run: NodeRun) -> list[CallResult]:
    return [call for call in run.result.calls if call.error is None]


def _answered(run: NodeRun) -> list[tuple[float, float]]:
    ends = sorted(call.started_s + call.seconds for call in _answered_calls(run))
    return [(0.0, 0.0), *((end, number) for number, end in enumerate(ends, start=1))]


def _hit_shares(run: NodeRun, window_s: float) -> list[tuple[float, float]]:
    """A call belongs to the window of its first token; a window without calls has no point."""
    windows: dict[int, list[CallResult]] = {}
    for call in _answered_calls(run):
        at_s = call.started_s + (call.ttft_s or 0.0)
        windows.setdefault(int(at_s / window_s), []).append(call)
    return [
        (
            min((number + 0.5) * window_s, run.result.seconds),
            100 * _hits(calls) / sum(call.prompt_tokens for call in calls),
        )
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
