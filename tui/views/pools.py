"""The host budget as one bar with its tenants and targets, the GPU pool as another, and reach."""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, Part, drop, ends, fit, line
from hisparsed.tui.views.bars import Segment, bar, gauge, marks
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import Document, dig, number


def _of(document: object, path: str) -> float:
    return number(document, path) or 0.0


def host_bar(pools: Document, width: int, context: ViewContext) -> list[Line]:
    """Marks of both targets above the bar: HiSparse from the left, offload from the right."""
    glyphs, budget = context.glyphs, max(1.0, _of(pools, "budget_bytes"))
    pending = _of(pools, "pending_bytes")
    draining = min(_of(pools, "draining_bytes"), _of(pools, "offload.capacity_bytes"))
    segments = []
    for pool, role in (("hisparse", "hisparse"), ("offload", "offload")):
        capacity = _of(pools, f"{pool}.capacity_bytes")
        if pool == "hisparse":
            capacity = max(0.0, capacity - pending)
        else:
            capacity = max(0.0, capacity - draining)
        in_use = min(capacity, _of(pools, f"{pool}.in_use_bytes"))
        cached = min(capacity - in_use, _of(pools, f"{pool}.cached_bytes"))
        segments += [
            Segment(in_use, glyphs.in_use, role),
            Segment(cached, glyphs.reusable, role),
            Segment(capacity - in_use - cached, glyphs.free, role),
        ]
        if pool == "hisparse":
            segments.append(Segment(pending, "P", "warn"))
        else:
            segments.append(Segment(draining, "D", "warn"))
    segments.append(Segment(_of(pools, "reserve_bytes"), "R", "free"))
    left = _of(pools, "hisparse.target_bytes") / budget
    right = 1 - _of(pools, "offload.target_bytes") / budget
    targets = [(right, glyphs.other_target, "offload"), (left, glyphs.target, "hisparse")]
    return [marks(targets, width), bar(segments, budget, width, free=" ")]


def host_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Six lines: bar with targets, a line a pool, what moves, and the live set."""
    pools, sessions = dig(model.observed, "pools"), dig(model.observed, "sessions")
    if not isinstance(pools, dict):
        return [line(("the engine has not reported yet", "dim"))]
    lines = host_bar(pools, width, context)
    for pool, mark in (
        ("hisparse", context.glyphs.target),
        ("offload", context.glyphs.other_target),
    ):
        lines.append(_pool_line(pools, pool, mark, width))
    return [*lines, _moving_line(pools, context, width), _live_set_line(sessions, width)]


def host_compact(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Five lines: the budget beside the marks, and what moves only while something does."""
    lines = host_lines(model, width, context)
    if len(lines) == 1:
        return lines
    pools = dig(model.observed, "pools")
    head = f"host budget {fmt.size(number(pools, 'budget_bytes'))}"
    if not lines[0].plain[: len(head) + 1].strip():
        lines[0] = line((head, "title")) + drop(lines[0], len(head))
    moves = number(pools, "pending_bytes") or number(pools, "draining_bytes")
    del lines[5 if moves else 4]
    return lines


def _pool_line(pools: Document, pool: str, mark: str, width: int) -> Line:
    capacity = number(pools, f"{pool}.capacity_bytes")
    target = number(pools, f"{pool}.target_bytes")
    to = "" if target == capacity else f" {mark}{fmt.size(target)}"
    used, cached = number(pools, f"{pool}.in_use_bytes"), number(pools, f"{pool}.cached_bytes")
    left = line(
        (f"{pool:<9}", pool),
        (f"{fmt.size(capacity):>9}", "strong"),
        (to, "warn"),
        f"  {fmt.size(used)} used",
        f", {fmt.size(cached)} reusable" if width >= 68 else "",
    )
    reach = fmt.short(number(pools, f"{pool}.reach_tokens"))
    return ends(left, line(("reach ", "dim"), (f"{reach:>6}", "strong"), (" tok", "dim")), width)


def _moving_line(pools: Document, context: ViewContext, width: int) -> Line:
    glyphs = context.glyphs
    legend = line(
        (f"{glyphs.in_use} used {glyphs.reusable} reusable {glyphs.free} free ", "dim"),
        (f"{glyphs.target}{glyphs.other_target} targets", "dim"),
    )
    pending, draining = number(pools, "pending_bytes"), number(pools, "draining_bytes")
    reserve = number(pools, "reserve_bytes")
    moving = line(
        (f"P pending {fmt.size(pending)}  ", "warn" if pending else "dim"),
        (f"D draining {fmt.size(draining)}", "warn" if draining else "dim"),
        (f"  R reserve {fmt.size(reserve)}" if reserve else "", "dim"),
    )
    return ends(moving, legend, width) if width >= 78 else fit(moving, width)


def _live_set_line(sessions: object, width: int) -> Line:
    coverage = number(sessions, "coverage")
    role = ""
    if coverage is not None:
        role = "bad" if coverage < 0.5 else "warn" if coverage < 1 else "good"
    live = number(sessions, "live")
    left = line(
        ("sessions ", "dim"),
        (fmt.whole(live), "strong"),
        (" live, live set ", "dim"),
        (fmt.short(number(sessions, "live_set_tokens")), "strong"),
        (" tok", "dim"),
    )
    words = "nothing idle" if coverage is None and live is not None else fmt.ratio(coverage)
    low = " LOW" if coverage is not None and coverage < 1 else ""
    return ends(left, line(("coverage ", "dim"), (words + low, role or "strong")), width)


def gpu_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Two lines: the bar, and what its letters are."""
    gpu = dig(model.observed, "gpu")
    total = number(gpu, "total_blocks")
    if total is None:
        return [line(("no report yet", "dim"))]
    free = number(gpu, "free_blocks") or 0.0
    resident, hot = number(gpu, "resident_blocks"), number(gpu, "hot_blocks")
    rest = max(0.0, total - free - (resident or 0) - (hot or 0))
    parts = [
        Segment(resident or 0.0, "r", "resident"),
        Segment(hot or 0.0, "h", "hot"),
        Segment(rest, "i", "indexer"),
    ]
    short = bool(dig(gpu, "waiting_for_blocks"))
    state = line(
        (f"{fmt.percent(free / total)} free", "bad" if short else "strong"),
        (" SHORT" if short else "", "bad"),
        (f" of {fmt.whole(total)}{' GPU blocks' if width >= 70 else ''}", "dim"),
    )
    other = ("indexer", "idx") if resident is not None else ("in use", "used")
    names, short_names = ("resident", "hot", other[0]), ("res.", "hot", other[1])
    counts = (fmt.whole(resident), fmt.whole(hot), fmt.whole(rest))
    words = _legend(names, counts)
    if words.cells + state.cells >= width:
        words = _legend(short_names, counts)
    return [bar(parts, total, width, free=context.glyphs.free), ends(words, state, width)]


def _legend(names: tuple[str, str, str], counts: tuple[str, str, str]) -> Line:
    parts: list[Part] = []
    for letter, role, name, count in zip(
        "rhi", ("resident", "hot", "indexer"), names, counts, strict=True
    ):
        parts += [("  " if parts else "", ""), (letter, role), f" {name} {count}"]
    return line(*parts)


def residency_bar(requests: object, width: int, context: ViewContext) -> Line:
    """Running requests by residency: F full, M mixed, N none."""
    counts = [number(requests, name) or 0.0 for name in ("full", "mixed", "none")]
    segments = [
        Segment(count, glyph, role)
        for count, glyph, role in zip(counts, "FMN", ("good", "hot", "indexer"), strict=True)
    ]
    return bar(segments, max(1.0, sum(counts)), width, free=context.glyphs.free)


def budget_gauge(share: float | None, width: int, context: ViewContext) -> Line:
    """How much of a budget is used; over it reads as full."""
    role = "bad" if (share or 0) > 1 else "warn" if (share or 0) > 0.8 else "good"
    return gauge(share, width, context.glyphs.in_use, role, free=context.glyphs.free)
