"""The panels of the overview: host pools, GPU pool, requests, hot buffers and service.

The host budget is one bar with its tenants and targets, the GPU pool another. ``overview`` lays the
panels out.
"""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, Part, ends, line
from hisparsed.tui.views.drawing import (
    WINDOW,
    BarSegment,
    ViewContext,
    bar,
    gauge,
    marks,
    now_value,
)
from hisparsed.tui.wire import Document, dig, items, number, text


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
            BarSegment(in_use, glyphs.in_use, role),
            BarSegment(cached, glyphs.reusable, role),
            BarSegment(capacity - in_use - cached, glyphs.free, role),
        ]
        if pool == "hisparse":
            segments.append(BarSegment(pending, "P", "warn"))
        else:
            segments.append(BarSegment(draining, "D", "warn"))
    segments.append(BarSegment(_of(pools, "reserve_bytes"), "R", "free"))
    left = _of(pools, "hisparse.target_bytes") / budget
    right = 1 - _of(pools, "offload.target_bytes") / budget
    targets = [(right, glyphs.other_target, "offload"), (left, glyphs.target, "hisparse")]
    return [marks(targets, width), bar(segments, budget, width, free=" ")]


def host_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Six lines: bar with targets, one line per pool, the moves, and the live set."""
    pools = dig(model.derived, "pools")
    if not isinstance(pools, dict):
        return [line(("the engine has not reported yet", "dim"))]
    lines = host_bar(pools, width, context)
    for pool, mark in (
        ("hisparse", context.glyphs.target),
        ("offload", context.glyphs.other_target),
    ):
        lines.append(_pool_line(pools, pool, mark, width, context))
    return [*lines, _moving_line(pools, context, width), _live_set_line(model, width)]


def host_compact(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Four lines: targets and moves only while blocks move."""
    lines = host_lines(model, width, context)
    pools = dig(model.derived, "pools")
    if len(lines) == 1 or not isinstance(pools, dict):
        return lines
    targets, bars, hisparse, offload, moving, live = lines
    settled = all(
        number(pools, f"{pool}.target_bytes") == number(pools, f"{pool}.capacity_bytes")
        for pool in ("hisparse", "offload")
    )
    return [
        *([] if settled else [targets]),
        bars, hisparse, offload,
        *([moving] if _moves(pools) else []),
        live,
    ]  # fmt: skip


def _moves(pools: Document) -> bool:
    names = ("pending_bytes", "draining_bytes", "reserve_bytes")
    return any(number(pools, name) for name in names)


_LEGENDS_FROM = 74
"""The width in cells from which a pool's line has room for the symbols of its bar."""


def _pool_line(pools: Document, pool: str, mark: str, width: int, context: ViewContext) -> Line:
    glyphs = context.glyphs
    capacity = number(pools, f"{pool}.capacity_bytes")
    target = number(pools, f"{pool}.target_bytes")
    to = "" if target == capacity else f" {mark}{fmt.size(target)}"
    used, cached = number(pools, f"{pool}.in_use_bytes"), number(pools, f"{pool}.cached_bytes")
    signs = width >= _LEGENDS_FROM
    left = line(
        (f"{pool:<9}", pool),
        (f"{fmt.size(capacity):>9}", "strong"),
        (to, "warn"),
        "  ", (f"{glyphs.in_use} " if signs else "", pool), f"{fmt.size(used)} used",
        *((", ", (f"{glyphs.reusable} ", pool), f"{fmt.size(cached)} reusable") if signs else ()),
    )  # fmt: skip
    reach = fmt.short(number(pools, f"{pool}.reach_tokens"))
    return ends(left, line(("reach ", "dim"), (f"{reach:>5}", "strong"), (" tokens", "dim")), width)


def _moving_line(pools: Document, context: ViewContext, width: int) -> Line:
    """The moves between the pools, and the symbols of the bar."""
    glyphs = context.glyphs
    legend = line(
        (f"{glyphs.in_use} used {glyphs.reusable} reusable {glyphs.free} free ", "dim"),
        (f"{glyphs.target}{glyphs.other_target} targets", "dim"),
    )
    parts: list[Part] = []
    for sign, name, path in (
        ("P", "pending", "pending_bytes"),
        ("D", "draining", "draining_bytes"),
        ("R", "reserve", "reserve_bytes"),
    ):
        amount = number(pools, path)
        if amount:
            role = "dim" if sign == "R" else "warn"
            parts.append((f"{sign} {name} {fmt.size(amount)}  ", role))
    moving = line(*parts) if parts else line(("nothing moves", "dim"))
    return ends(moving, legend, width) if moving.cells + legend.cells < width else moving


def _live_set_line(model: NodeModel, width: int) -> Line:
    sessions, coverage = dig(model.observed, "sessions"), number(model.derived, "coverage")
    role = ""
    if coverage is not None:
        role = "bad" if coverage < 0.5 else "warn" if coverage < 1 else "good"
    live = number(sessions, "live_sessions")
    left = line(
        (fmt.whole(live), "strong"),
        (" live sessions with ", "dim"),
        (fmt.short(number(sessions, "live_set_tokens")), "strong"),
        (" tokens", "dim"),
    )
    words = "nothing idle" if coverage is None and live is not None else fmt.ratio(coverage)
    low = " LOW" if coverage is not None and coverage < 1 else ""
    return ends(left, line(("coverage ", "dim"), (words + low, role or "strong")), width)


def gpu_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Two lines: the bar, and the meaning of its letters."""
    gpu = dig(model.observed, "gpu")
    total = number(gpu, "total_blocks")
    if total is None:
        return [line(("no report yet", "dim"))]
    free = number(gpu, "free_blocks") or 0.0
    resident = number(gpu, "resident_blocks")
    hot = number(model.observed, "hot.leased_blocks")
    rest = max(0.0, total - free - (resident or 0) - (hot or 0))
    parts = [
        BarSegment(resident or 0.0, "r", "resident"),
        BarSegment(hot or 0.0, "h", "hot"),
        BarSegment(rest, "i", "indexer"),
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
        BarSegment(count, glyph, role)
        for count, glyph, role in zip(counts, "FMN", ("good", "hot", "indexer"), strict=True)
    ]
    return bar(segments, max(1.0, sum(counts)), width, free=context.glyphs.free)


def budget_gauge(share: float | None, width: int, context: ViewContext) -> Line:
    """The used share of a budget; above 1 the gauge is full."""
    role = "bad" if (share or 0) > 1 else "warn" if (share or 0) > 0.8 else "good"
    return gauge(share, width, role, context.glyphs)


_CURVE = (1.0, 1.5, 2.0, 3.0, 4.0)


def request_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Three lines: counts, residency as a bar, and admission."""
    requests, admission = dig(model.observed, "requests"), dig(model.observed, "admission")
    waiting, held = number(requests, "waiting"), number(requests, "held_back")
    counts = line(
        (fmt.whole(number(requests, "running")), "strong"), " running  ",
        (fmt.whole(waiting), "warn" if waiting else "strong"), " waiting",
        (f" ({fmt.whole(held)} held back)" if held else "", "warn"),
    )  # fmt: skip
    totals = line(
        (fmt.whole(number(requests, "preemptions_total")), "strong"), (" preempted  ", "dim"),
        (fmt.short(number(requests, "finished_total")), "strong"), (" finished", "dim"),
    )  # fmt: skip
    words = line(
        *(
            part
            for name, letter, role in (
                ("full", "F", "good"),
                ("mixed", "M", "hot"),
                ("none", "N", "indexer"),
            )
            for part in (
                (letter, role),
                f" {name} {fmt.whole(number(requests, name))}  ",
            )
        )
    )
    bar_width = max(8, width - words.cells)
    ages = line(
        ("order ", "dim"), (text(admission, "order") or fmt.UNKNOWN, "strong"),
        (f", ageing {fmt.duration(number(admission, 'ageing_s'))}", "dim"),
    )  # fmt: skip
    limit = number(admission, "max_waiting_sessions")
    rules = line(
        (f"at most {fmt.whole(number(admission, 'max_running'))} running", "dim"),
        (f", refuse beyond {fmt.whole(limit)} waiting" if limit is not None else "", "warn"),
    )
    return [
        ends(counts, totals, width),
        words + residency_bar(requests, bar_width, context),
        ends(ages, rules, width),
    ]


def hot_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Three lines: multiplier and misses, the predicted curve, H2D against its budget."""
    return [_hot_line(model, width), _curve_line(model), _h2d_line(model, width, context)]


def hot_compact(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Two lines, without the predicted curve."""
    return [_hot_line(model, width), _h2d_line(model, width, context)]


def _hot_line(model: NodeModel, width: int) -> Line:
    hot = dig(model.observed, "hot")
    blocks = fmt.whole(number(hot, "lease_blocks"))
    head = line(
        ("hot buffers ", "dim"), (fmt.multiplier(number(hot, "multiplier")), "strong"),
        (f" top-k, {blocks} blocks per group, " if width >= 70 else " top-k, ", "dim"),
        (fmt.whole(number(hot, "leased_requests")), "strong"), (" leased", "dim"),
    )  # fmt: skip
    tail = line(("misses ", "dim"), (now_value(model, "miss"), "strong"), (f" {WINDOW}", "dim"))
    sampled = dig(model.observed, "sampled_rows")
    if sampled is not None and dig(hot, "counted") is False:
        tail = _sampled(sampled)
    return ends(head, tail, width)


def _sampled(sampled: object) -> Line:
    """The rare figures of vLLM's own kernels: misses since the start, and the age of the sample."""
    hits, misses = number(sampled, "hits_total"), number(sampled, "misses_total")
    rows = (hits or 0.0) + (misses or 0.0)
    share = misses / rows if misses is not None and rows else None
    age_s = number(sampled, "age_s")
    age = fmt.UNKNOWN if age_s is None else fmt.whole_duration(age_s)
    return line(
        ("misses ", "dim"), (fmt.percent(share, 1), "strong"), (f" as of {age} ago", "dim"),
    )  # fmt: skip


def _curve_line(model: NodeModel) -> Line:
    """Predicted misses at sizes that an operator would think of; the one in force is marked."""
    points = {
        number(point, "multiplier"): number(point, "miss_fraction")
        for point in items(model.observed, "hot.predicted")
    }
    if not points:
        return line(("predicted misses: none measured", "dim"))
    current = number(model.observed, "hot.multiplier")
    wanted = (*_CURVE, current)
    shown = sorted(one for one in points if one is not None and one in wanted)
    parts: list[tuple[str, str]] = [("predicted ", "dim")]
    for multiplier in shown:
        here = multiplier == current
        label = f"{fmt.multiplier(multiplier)} {fmt.percent(points[multiplier])}"
        parts.append((f"[{label}] " if here else f"{label}  ", "strong" if here else ""))
    return line(*parts)


def h2d_share(model: NodeModel) -> float | None:
    """Rows loaded to the GPU as a share of the policy's PCIe budget."""
    rate, budget = model.history.latest("h2d"), number(model.policy, "value.hot.pcie_budget")
    return rate / budget if rate is not None and budget else None


def _h2d_line(model: NodeModel, width: int, context: ViewContext) -> Line:
    budget, share = number(model.policy, "value.hot.pcie_budget"), h2d_share(model)
    of = f" of {fmt.per_second(budget)} {'PCIe budget ' if width >= 66 else ''}"
    words = line(
        ("loaded ", "dim"), (now_value(model, "h2d"), "strong"), (f" {WINDOW}", "dim"),
        (of if budget else " ", "dim"),
    )  # fmt: skip
    percent = line((f" {fmt.percent(share):>4}", "strong"))
    room = width - words.cells - percent.cells
    if room < 6 or share is None:
        return ends(words, percent, width)
    return words + budget_gauge(share, room, context) + percent


def service_lines(model: NodeModel, width: int) -> list[Line]:
    """Two lines of rates and latencies, all over the same window."""

    def value(name: str) -> tuple[str, str]:
        return now_value(model, name), "strong"

    latency = line(("first token ", "dim"), value("ttft"), ("  between ", "dim"), value("itl"))
    flow = line(("tokens in ", "dim"), value("prompt"), ("  out ", "dim"), value("tokens"))
    prefix = line(("prefix hits ", "dim"), value("prefix"))
    calls = line(("calls finished ", "dim"), value("finished"))
    window = line((f"all {WINDOW}", "dim"))
    if latency.cells + flow.cells + prefix.cells + window.cells + 6 <= width:
        gap = line("  ")
        return [ends(latency + gap + flow + gap + prefix, window, width)]
    return [ends(latency, calls, width), ends(flow, prefix, width)]
