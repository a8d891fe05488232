"""Several nodes, one line each, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hisparsed.tui import format as fmt
from hisparsed.tui.model import Connection, NodeModel
from hisparsed.tui.styled import Line, ends, fit, line
from hisparsed.tui.views.drawing import WINDOW, ViewContext, columns, series_values
from hisparsed.tui.views.health import engine_summary
from hisparsed.tui.wire import number, text

_LABEL = 18
_LEAST_CHART = 24
_WIDEST_CHART = 120
_STATE = 20


def worst_first(models: Iterable[NodeModel]) -> list[NodeModel]:
    """By severity, then by how short the node is of memory, then by name."""
    return sorted(models, key=_order)


def _order(model: NodeModel) -> tuple[float, float, str]:
    coverage = number(model.derived, "coverage")
    return (-model.severity().rank, coverage if coverage is not None else float("inf"), model.label)


def fleet_titles(width: int, span_s: float | None = None) -> str:
    """The line above the table; a narrow screen has fewer columns, and no charts."""
    label, state = _head_cells(width)
    titles = f"{'node':<{label}}{'state':<{state}}" + "".join(
        f"{column.title:>{column.cells}}" for column in _columns(width)
    )
    if span_s is None or width - len(titles) - 2 < _LEAST_CHART:
        return titles
    return f"{titles}  tokens out, last {fmt.span(span_s)}"


def fleet_line(model: NodeModel, width: int, context: ViewContext) -> Line:
    severity, more = model.severity(), context.glyphs.more
    role = "bad" if severity.rank >= 60 else "warn" if severity.rank >= 10 else "good"
    mark = context.glyphs.off if severity.rank >= 60 else context.glyphs.on
    state = severity.word
    life = engine_summary(model.status)
    if model.link is Connection.LOST:
        never = model.status is None
        state = "never reached" if never else f"lost {fmt.clock(model.link_since_s)}"
    elif life is not None and life.next_try_s is not None:
        left_s = round(life.next_try_s - (model.node_now_s(context.now_s) or life.next_try_s))
        state = f"engine: try in {fmt.whole_duration(left_s)}" if left_s > 0 else state
    label_cells, state_cells = _head_cells(width)
    whole = (
        fit(line((model.name, "title")), label_cells - 1, more=more)
        + line(" ")
        + fit(line((f"{mark} {state}", role)), state_cells - 1, more=more)
        + line(" ")
    )
    why = model.link_why.removeprefix(f"{model.address}: ")
    if model.status is None and why:
        return whole + line((why, "bad"))
    dull = "dim" if model.outdated else ""
    for index, column in enumerate(_columns(width)):
        figure = f"{column.figure(model):>{column.cells}}"
        whole += line((figure, dull or ("strong" if index == 0 else "")))
    room = width - whole.cells - 2
    if room < _LEAST_CHART:
        return whole
    # One cell is the scroll bar's.
    values = series_values(model.history, "tokens", min(room - 1, _WIDEST_CHART), context)
    most = max((value for value in values if value is not None), default=0.0)
    return whole + line("  ", (columns(values, 1, most or 1.0, context.glyphs)[0], "chart"))


def _free(model: NodeModel) -> str:
    free, total = (
        number(model.observed, "gpu.free_blocks"),
        number(model.observed, "gpu.total_blocks"),
    )
    return fmt.percent(free / total if total and free is not None else None)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: int
    figure: Callable[[NodeModel], str]


def _shown(path: str, show: Callable[[float | None], str]) -> Callable[[NodeModel], str]:
    return lambda model: show(number(model.status, path))


def _latest(name: str, show: Callable[[float | None], str]) -> Callable[[NodeModel], str]:
    return lambda model: show(model.history.latest(name))


_COLUMNS = (
    _Column("coverage", 9, _shown("derived.coverage", fmt.ratio)),
    _Column("run", 6, _shown("observed.requests.running", fmt.whole)),
    _Column("wait", 6, _shown("observed.requests.waiting", fmt.whole)),
    _Column("GPU free", 9, _free),
    _Column("tok/s", 8, _latest("tokens", fmt.short)),
    _Column("TTFT", 8, _latest("ttft", fmt.duration)),
    _Column("misses", 8, _latest("miss", lambda share: fmt.percent(share, 1))),
    _Column("multiplier", 11, _shown("observed.hot.multiplier", fmt.multiplier)),
    _Column("host", 10, _shown("derived.pools.budget_bytes", fmt.size)),
    _Column("gen", 5, lambda model: fmt.setting(model.generation)),
)
_NARROW = 6
"""Columns that a small terminal has room for."""
_WIDE = _LABEL + _STATE + sum(column.cells for column in _COLUMNS)


def _columns(width: int) -> tuple[_Column, ...]:
    return _COLUMNS if width >= _WIDE else _COLUMNS[:_NARROW]


def _head_cells(width: int) -> tuple[int, int]:
    """For the node's name and its state; the name gets the cells that the figures leave."""
    if width >= _WIDE:
        return _LABEL, _STATE
    # One cell is the scroll bar's.
    figures = sum(column.cells for column in _columns(width))
    return max(8, min(30, width - 1 - _STATE - figures)), _STATE


def fleet_summary(models: Iterable[NodeModel], width: int) -> Line:
    """The number of nodes in each state, and their sums."""
    counts: dict[str, int] = {}
    running = tokens = 0.0
    known = list(models)
    for model in known:
        word = model.severity().word
        counts[word] = counts.get(word, 0) + 1
        if not model.stale:
            running += number(model.observed, "requests.running") or 0.0
            tokens += model.history.latest("tokens") or 0.0
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    versions = {text(model.status, "node.version") for model in known} - {None}
    several = ", ".join(sorted(map(str, versions)))
    mixed = f"  MIXED VERSIONS: {several}" if len(versions) > 1 else ""
    left = line((f"{len(known)} nodes: ", "title"), words, (mixed, "warn"))
    right = line(
        (f"{running:.0f} running, {fmt.short(tokens)} tok/s", "strong"),
        (f", rates {WINDOW}", "dim"),
    )
    return ends(left, right, width)
