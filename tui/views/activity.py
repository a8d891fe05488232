"""What the node is busy with: requests, hot buffers against the PCIe budget, and service."""

from __future__ import annotations

from collections.abc import Callable

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, ends, fit, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.pools import budget_gauge, residency_bar
from hisparsed.tui.wire import dig, items, number, text

_NOW_S = 10.0
_WINDOW_S = 60.0
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
    hot, history = dig(model.observed, "hot"), model.history
    miss = history.latest("miss", _WINDOW_S)
    head = line(
        (fmt.multiplier(number(hot, "multiplier")), "strong"),
        (f" top-k ({fmt.whole(number(hot, 'lease_blocks'))} blocks a group), ", "dim"),
        (fmt.whole(number(hot, "leased_requests")), "strong"), (" leased", "dim"),
    )  # fmt: skip
    tail = line(
        ("misses ", "dim"), (fmt.percent(miss, 1), "strong"), (" in 1m", "dim"),
    )  # fmt: skip
    if dig(hot, "sampled") is not None and number(hot, "hits_total") is None:
        tail = _sampled(hot)
    return [ends(head, tail, width), _curve_line(model), _h2d_line(model, width, context)]


def _sampled(hot: object) -> Line:
    """What vLLM's own kernels tell, rarely: misses since the start, and how old that is."""
    hits, misses = number(hot, "sampled.hits_total"), number(hot, "sampled.misses_total")
    rows = (hits or 0.0) + (misses or 0.0)
    share = misses / rows if misses is not None and rows else None
    age_s = number(hot, "sampled.age_s")
    age = fmt.UNKNOWN if age_s is None else fmt.whole_duration(age_s)
    return line(
        ("misses ", "dim"), (fmt.percent(share, 1), "strong"), (f" as of {age} ago", "dim"),
    )  # fmt: skip


def _curve_line(model: NodeModel) -> Line:
    """Predicted misses at sizes that an operator would think of; the one in force is marked."""
    points = {
        number(point, "multiplier"): number(point, "misses")
        for point in items(model.observed, "hot.miss_curve")
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


def _h2d_line(model: NodeModel, width: int, context: ViewContext) -> Line:
    rate = model.history.latest("h2d", _NOW_S)
    budget = number(model.policy, "value.hot.pcie_budget")
    share = rate / budget if rate is not None and budget else None
    words = line(
        ("H2D ", "dim"), (f"{fmt.per_second(rate):>10}", "strong"),
        (f" of {fmt.per_second(budget)} PCIe budget " if budget else " ", "dim"),
    )  # fmt: skip
    percent = line((f" {fmt.percent(share):>4}", "strong"))
    room = width - words.cells - percent.cells
    if room < 6:
        return ends(words, percent, width)
    return words + budget_gauge(share, room, context) + percent


def service_lines(model: NodeModel, width: int) -> list[Line]:
    """Three lines: latency, throughput and prefix hits, over the last minute."""
    history = model.history

    def value(name: str, show: Callable[[float | None], str]) -> str:
        return show(history.latest(name, _WINDOW_S))

    latency = line(
        ("TTFT ", "dim"), (value("ttft", fmt.duration), "strong"),
        ("  ITL ", "dim"), (value("itl", fmt.duration), "strong"),
    )  # fmt: skip
    flow = line(
        ("tok/s in ", "dim"), (value("prompt", fmt.short), "strong"),
        ("  out ", "dim"), (value("tokens", fmt.short), "strong"),
    )  # fmt: skip
    prefix = line(
        ("prefix hits ", "dim"), (value("prefix", lambda one: fmt.percent(one, 1)), "strong"),
        ("  calls/s ", "dim"), (value("finished", fmt.short), "strong"),
    )  # fmt: skip
    serving = dig(model.observed, "serving")
    since = line(
        (f"since start {fmt.duration(number(serving, 'mean_ttft_s'))}", "dim"),
    )  # fmt: skip
    totals = line(
        (f"{fmt.short(number(serving, 'generated_tokens_total'))} out in all", "dim"),
    )  # fmt: skip
    asked, hit = (
        number(serving, "prefix_query_tokens_total"),
        number(serving, "prefix_hit_tokens_total"),
    )
    over = line((f"{fmt.percent(hit / asked, 1)} in all" if asked and hit else "", "dim"))
    return [ends(latency, since, width), ends(flow, totals, width), ends(prefix, over, width)]


def service_line(model: NodeModel, width: int) -> Line:
    """The same in one line, for small terminals."""
    latest = model.history.latest
    return fit(
        line(
            ("TTFT ", "dim"), (fmt.duration(latest("ttft", _WINDOW_S)), "strong"),
            (" ITL ", "dim"), (fmt.duration(latest("itl", _WINDOW_S)), "strong"),
            ("  tok/s in ", "dim"), (fmt.short(latest("prompt", _WINDOW_S)), "strong"),
            (" out ", "dim"), (fmt.short(latest("tokens", _WINDOW_S)), "strong"),
            ("  prefix hits ", "dim"), (fmt.percent(latest("prefix", _WINDOW_S)), "strong"),
        ),
        width,
    )  # fmt: skip
