"""The GPUs as NVML tells of them: one line for all of them, and a line each.

Nothing where the status document has none. Blocks of the GPU pool are `pools`' to show.
"""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, Part, ends, fit, line
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import Document, dig, items, number

OLD_S = 5.0
"""NVML is read once a second; it hangs while somebody pins memory."""
FULL_LINK = 0.9
"""Share of the link beyond which traffic waits for it."""
_AT_CAP = "power-cap"
"""How a busy GPU runs, so no trouble."""
_SHOWN = 3
"""GPUs in trouble that one line names."""


def gpus_line(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """The fullest, the load, the busiest link and who is slow or lost; nothing without GPUs."""
    cards = items(model.status, "gpus.cards")
    if not cards:
        return []
    left = line(
        ("GPUs ", "title"), (fmt.whole(len(cards)), "strong"),
        ("  fullest ", "dim"), *_memory(max(cards, key=_fullness)),
        ("  load ", "dim"), (_load(cards), "strong"),
        *_busiest("  PCIe in ", "pcie_rx_bytes_per_s", cards),
        *_busiest(", out ", "pcie_tx_bytes_per_s", cards),
        *([(" of link", "dim")] if any(_link(card) for card in cards) else []),
    )  # fmt: skip
    state = line(*_state(cards), *_age(model))
    if state.cells >= width:
        return [fit(state, width, more=context.glyphs.more)]
    return [ends(left, line("  ") + state, width)]


def gpu_rows(model: NodeModel) -> list[Line]:
    """A line a GPU, under one that says how old the reading is; nothing without GPUs."""
    cards = items(model.status, "gpus.cards")
    if not cards:
        return []
    head = line(("GPUs ", "title"), (f"as of {_age_text(model)} ago", "dim"), *_age(model))
    return [head, *(_row(card) for card in cards)]


def _row(card: Document) -> Line:
    name = line((f"{fmt.whole(number(card, 'index')):>3} ", "strong"))
    if dig(card, "lost") is True:
        return name + line(("LOST", "bad"), " fell off the bus, or needs a reset")
    slowed = _slowed(card)
    return name + line(
        *_memory(card),
        ("  load ", "dim"), (f"{fmt.percent(number(card, 'utilization')):>4}", "strong"),
        *_traffic("  PCIe in ", "pcie_rx_bytes_per_s", card),
        *_traffic(", out ", "pcie_tx_bytes_per_s", card), *_link(card),
        "  ", *(_reasons(slowed) if slowed is not None else [("clocks not known", "dim")]),
    )  # fmt: skip


def _memory(card: Document) -> list[Part]:
    used, total = number(card, "memory_used_bytes"), number(card, "memory_total_bytes")
    return [(fmt.size(used), "strong"), (f" of {fmt.size(total)}", "dim")]


def _fullness(card: Document) -> float:
    return number(card, "memory_used_bytes") or 0.0


def _load(cards: list[Document]) -> str:
    loads = [load for card in cards if (load := number(card, "utilization")) is not None]
    if not loads:
        return fmt.UNKNOWN
    low, high = fmt.percent(min(loads)), fmt.percent(max(loads))
    return high if low == high else f"{low} to {high}"


def _busiest(name: str, key: str, cards: list[Document]) -> list[Part]:
    return _traffic(name, key, max(cards, key=lambda card: number(card, key) or 0.0))


def _traffic(name: str, key: str, card: Document) -> list[Part]:
    """With the share of what the link can do, where that is known."""
    rate, link = number(card, key), number(card, "pcie_link_bytes_per_s")
    parts: list[Part] = [(name, "dim"), (fmt.per_second(rate), "strong")]
    if rate is not None and link:
        share = rate / link
        parts.append((f" {fmt.percent(share)}", "warn" if share > FULL_LINK else "dim"))
    return parts


def _link(card: Document) -> list[Part]:
    link = number(card, "pcie_link_bytes_per_s")
    return [] if link is None else [(f" of {fmt.per_second(link)}", "dim")]


def _state(cards: list[Document]) -> list[Part]:
    """Who is lost, then who is slow; the first few of them."""
    lost = [card for card in cards if dig(card, "lost") is True]
    slow = [card for card in cards if card not in lost and _troubles(card)]
    parts: list[Part] = []
    for card in [*lost, *slow][:_SHOWN]:
        words = "LOST" if card in lost else f"SLOW {', '.join(_troubles(card))}"
        gap = "  " if parts else ""
        role = "bad" if card in lost else "warn"
        parts.append((f"{gap}{fmt.whole(number(card, 'index'))} {words}", role))
    more = len(lost) + len(slow) - _SHOWN
    if more > 0:
        parts.append((f"  {more} more", "bad"))
    if parts:
        return parts
    known = [slowed for card in cards if (slowed := _slowed(card)) is not None]
    if not known:
        return [("clocks not known", "dim")]
    capped = sum(_AT_CAP in slowed for slowed in known)
    return [(f"{capped} at their power cap", "")] if capped else _reasons([])


def _reasons(slowed: list[str]) -> list[Part]:
    if not slowed:
        return [("full speed", "good")]
    if slowed == [_AT_CAP]:
        return [("at its power cap", "")]
    return [(f"SLOW {', '.join(slowed)}", "warn")]


def _slowed(card: Document) -> list[str] | None:
    found = dig(card, "slowed_by")
    return [str(one) for one in found] if isinstance(found, list) else None


def _troubles(card: Document) -> list[str]:
    return [one for one in _slowed(card) or [] if one != _AT_CAP]


def _age(model: NodeModel) -> list[Part]:
    age_s = number(model.status, "gpus.age_s")
    if age_s is None or age_s <= OLD_S:
        return []
    return [(f"  OLD, {_age_text(model)}: NVML does not answer", "warn")]


def _age_text(model: NodeModel) -> str:
    age_s = number(model.status, "gpus.age_s")
    return fmt.UNKNOWN if age_s is None else fmt.whole_duration(age_s)
