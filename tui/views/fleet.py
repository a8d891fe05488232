"""Several nodes, a line each, worst first."""

from __future__ import annotations

from collections.abc import Iterable

from hisparsed.tui import format as fmt
from hisparsed.tui.model import Link, NodeModel
from hisparsed.tui.styled import Line, ends, line
from hisparsed.tui.views.chart import columns, series_values
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import number, text

_LABEL = 18
_STATE = 20


def worst_first(models: Iterable[NodeModel]) -> list[NodeModel]:
    """By severity, then by how short the node is of memory, then by name."""
    return sorted(models, key=_order)


def _order(model: NodeModel) -> tuple[float, float, str]:
    coverage = number(model.observed, "sessions.coverage")
    return (-model.severity().rank, coverage if coverage is not None else float("inf"), model.label)


FLEET_TITLES = (
    f"{'node':<{_LABEL}}{'state':<{_STATE}}{'cover':>7}{'run':>6}{'wait':>6}{'GPU free':>9}"
    f"{'tok/s':>8}{'TTFT':>8}{'misses':>8}{'multi':>7}{'host budget':>13}  gen"
)


def fleet_line(model: NodeModel, width: int, context: ViewContext) -> Line:
    severity, observed = model.severity(), model.observed
    role = "bad" if severity.rank >= 60 else "warn" if severity.rank >= 10 else "good"
    mark = context.glyphs.off if severity.rank >= 60 else context.glyphs.on
    state = severity.word
    if model.link is Link.LOST:
        state = f"lost {fmt.clock(model.link_since_s)}"
    dull = "dim" if model.stale else ""
    free, total = number(observed, "gpu.free_blocks"), number(observed, "gpu.total_blocks")
    history = model.history
    figures = line(
        (f"{fmt.ratio(number(observed, 'sessions.coverage')):>7}", dull or "strong"),
        (f"{fmt.whole(number(observed, 'requests.running')):>6}", dull),
        (f"{fmt.whole(number(observed, 'requests.waiting')):>6}", dull),
        (f"{fmt.percent(free / total if total and free is not None else None):>9}", dull),
        (f"{fmt.short(history.latest('tokens', 10)):>8}", dull),
        (f"{fmt.duration(history.latest('ttft', 60)):>8}", dull),
        (f"{fmt.percent(history.latest('miss', 60), 1):>8}", dull),
        (f"{fmt.multiplier(number(observed, 'hot.multiplier')):>7}", dull),
        (f"{fmt.size(number(observed, 'pools.budget_bytes')):>13}", dull),
        (f"  {fmt.setting(model.generation)}", dull),
    )
    left = line(
        (f"{model.label[: _LABEL - 1]:<{_LABEL}}", "title"),
        (f"{mark} {state}"[: _STATE - 1].ljust(_STATE), role),
    )
    whole = left + figures
    room = width - whole.cells - 2
    if room < 12:
        return whole
    values = series_values(history, "tokens", min(room, 60), context)
    most = max((value for value in values if value is not None), default=0.0)
    return whole + line("  ", (columns(values, 1, most or 1.0, context.glyphs)[0], "chart"))


def fleet_summary(models: Iterable[NodeModel], width: int) -> Line:
    """How many nodes are in which state, and what they do together."""
    counts: dict[str, int] = {}
    running = tokens = 0.0
    known = list(models)
    for model in known:
        word = model.severity().word
        counts[word] = counts.get(word, 0) + 1
        if not model.stale:
            running += number(model.observed, "requests.running") or 0.0
            tokens += model.history.latest("tokens", 10) or 0.0
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    versions = {text(model.status, "node.version") for model in known} - {None}
    several = ", ".join(sorted(map(str, versions)))
    mixed = f"  MIXED VERSIONS: {several}" if len(versions) > 1 else ""
    left = line((f"{len(known)} nodes: ", "title"), words, (mixed, "warn"))
    right = line((f"{running:.0f} running, {fmt.short(tokens)} tok/s", "strong"))
    return ends(left, right, width)
