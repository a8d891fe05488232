"""The node's health: the engine's state, GPUs, what the doctor found, canary and journal.

Nodes of earlier versions lack some parts; these are marked or empty. Blocks of the GPU pool are in
``panels``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import EMPTY, Line, Part, ends, fit, hanging, line, wrap
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.wire import Document, dig, items, number, text

_TITLE = (f"{'engine':<9}", "title")
_INDENT = " " * 9
_WITH_ENGINE = ("serving", "draining")
_OVER = ("failed", "stopped")


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """Times are the node's Unix seconds."""

    state: str
    since_s: float | None
    next_try_s: float | None
    ends: int
    """Ends and failed starts that count against ``most``."""
    most: int
    why: str | None
    """Of the last end."""
    ended_s: float | None

    @property
    def has_engine(self) -> bool:
        """Whether there is one that reports."""
        return self.state in _WITH_ENGINE

    @property
    def over(self) -> bool:
        return self.state in _OVER

    @property
    def role(self) -> str:
        return "good" if self.state == "serving" else "bad" if self.over else "warn"

    def words(self, now_s: float | None) -> str:
        """For example "engine restarting for 4s, next try in 8s, 2 ends (at most 5)"."""
        words = f"engine {self.state}"
        if now_s is not None and self.since_s is not None:
            words += f" for {fmt.whole_duration(now_s - self.since_s)}"
        if now_s is not None and self.next_try_s is not None:
            left_s = round(self.next_try_s - now_s)
            words += f", next try {f'in {fmt.whole_duration(left_s)}' if left_s > 0 else 'now'}"
        if self.ends:
            words += f", {self.ends} end{'s' if self.ends > 1 else ''}"
            words += f" (at most {self.most})" if self.most else ""
        return words


def engine_summary(status: object) -> EngineSummary | None:
    """``None`` where the node does not report."""
    state = text(status, "engine.state")
    if state is None:
        return None
    return EngineSummary(
        state=state,
        since_s=number(status, "engine.since_unix_s"),
        next_try_s=number(status, "engine.next_try_unix_s"),
        ends=int(number(status, "engine.ends_in_window") or 0),
        most=int(number(status, "engine.most_restarts") or 0),
        why=text(status, "engine.last_exit.why"),
        ended_s=number(status, "engine.last_exit.at_unix_s"),
    )


def engine_lines(
    status: object, now_s: float | None, width: int, context: ViewContext
) -> list[Line]:
    """State and times; then the last end, and the quarantined values."""
    life = engine_summary(status)
    if life is None:
        return []
    mark = context.glyphs.on if life.state == "serving" else context.glyphs.off
    words = life.words(now_s).removeprefix("engine ")
    restarts = number(status, "engine.restarts_total")
    lines = [
        line(
            _TITLE,
            (f"{mark} {words}", life.role),
            f", {fmt.whole(restarts)} restart{'s' if restarts > 1 else ''}" if restarts else "",
        )
    ]
    if life.why is not None:
        head = line((f"{_INDENT}last end {fmt.clock(life.ended_s)}: ", "dim"))
        lines += hanging(head, life.why, width)
        evidence = text(status, "engine.last_exit.evidence")
        if evidence is not None:
            lines += hanging(line((f"{_INDENT}evidence ", "dim")), evidence, width)
    return [*lines, *_quarantined(status, width)]


def _quarantined(status: object, width: int) -> list[Line]:
    error = text(status, "engine.quarantined.error")
    if error is None:
        return []
    at = fmt.clock(number(status, "engine.quarantined.at_unix_s"))
    changes = ", ".join(
        f"{one.get('key')} = {fmt.setting(one.get('wanted'))}"
        for one in items(status, "engine.quarantined.changes")
    )
    head = line(
        (f"{_INDENT}QUARANTINED ", "bad"), f"at {at}: {changes or 'values'} did not start; "
        "the last good ones are in force"
    )  # fmt: skip
    room = max(20, width - len(_INDENT))
    return [head, *(line(_INDENT) + one for one in wrap(error, room, "bad"))]


OLD_S = 5.0
"""NVML is read once per second; it hangs while a process pins memory."""
FULL_LINK = 0.9
"""Share of the link beyond which traffic waits for it."""
_AT_CAP = "power-cap"
"""Normal for a busy GPU, so not a problem."""
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
    """One line per GPU, under one that says how old the reading is; nothing without GPUs."""
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
    """The lost GPUs, then the slow ones; the first few of them."""
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


NOT_AVAILABLE = "not available in this version"
NOT_YET = "not yet; it comes with the engine"
NOT_RECORDED = "not in a recorded journal; its events are on page 2"
_SEVERITIES = {"fatal": ("FATAL", "bad"), "warning": ("WARN", "warn"), "note": ("note", "dim")}


_WRAPPED = 3
"""Warnings and errors that are shown in full; further ones have one line each."""


def health_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Engine, the doctor's findings with one line each, canary and journal."""
    now_s = model.node_now_s(context.now_s)
    return [
        *engine_lines(model.status, now_s, width, context),
        *_step_cpu(model),
        *gpus_line(model, width, context),
        *_kernels(model.status, width),
        *_doctor(model.status, now_s, width),
        *_canary(model.status, width, context),
        _journal(model.status, context),
    ]


def _step_cpu(model: NodeModel) -> list[Line]:
    half_s = number(model.observed, "step_cpu.p50_s")
    if half_s is None:
        return []
    most = fmt.duration(number(model.observed, "step_cpu.p99_s"))
    busy = number(model.observed, "step_cpu.busy_ratio")
    share = [] if busy is None else [(", busy ", "dim"), (fmt.percent(busy), "strong")]
    return [
        line(
            (f"{_INDENT}scheduler ", "dim"), (fmt.duration(half_s), "strong"),
            (" of CPU a step, p99 ", "dim"), (most, "strong"), *share, (", in 1m", "dim"),
        )
    ]  # fmt: skip


_TRUSTED = ("Configured", "Proved")
"""Reasons for whose kernels run that need no attention."""


def _kernels(status: object, width: int) -> list[Line]:
    """The kernels that find rows in hot buffers, and those that are not used; empty except on CUDA
    nodes."""
    reason, sentence = text(status, "kernels.reason"), text(status, "kernels.sentence")
    if reason is None:
        return []
    role = "good" if reason == "Proved" else "dim" if reason in _TRUSTED else "warn"
    head = line((f"{'kernels':<9}", "title"), (f"{reason} ", role))
    lines = hanging(head, sentence or "", width)
    if dig(status, "kernels.offload_trusted") is False:
        words = text(status, "kernels.offload_sentence") or ""
        lines += hanging(line((f"{_INDENT}UNPROVED ", "bad")), words, width)
    return lines


def _doctor(status: object, now_s: float | None, width: int) -> list[Line]:
    title = (f"{'doctor':<9}", "title")
    if dig(status, "doctor") is None:
        return [line(title, (_not_there(status, "doctor"), "dim"))]
    findings = items(status, "doctor.findings")
    looked_s, error = number(status, "doctor.at_unix_s"), text(status, "doctor.error")
    ago = fmt.UNKNOWN if now_s is None or looked_s is None else fmt.whole_duration(now_s - looked_s)
    when = ", checking again now" if dig(status, "doctor.looking") else f", checked {ago} ago"
    lines = []
    if findings:
        told = [text(one, "severity") for one in findings]
        counts = [
            (f"{count} {word}{'s' if count > 1 and plural else ''}  ", _SEVERITIES[word][1])
            for word, plural in (("fatal", False), ("warning", True), ("note", True))
            if (count := told.count(word))
        ]
        lines.append(line(title, *counts, (f"d shows all{when}", "dim")))
        grave = sum(one != "note" for one in told)
        for one in findings:
            whole = grave <= _WRAPPED and text(one, "severity") != "note"
            lines += _finding(one, width if whole else None)
    else:
        checks = fmt.whole(number(status, "doctor.checks"))
        lines.append(line(title, ("no findings", "good"), (f" of {checks} checks{when}", "dim")))
    if error is not None:
        lines.append(line((f"{_INDENT}TROUBLE ", "bad"), error))
    return lines


def _finding(one: Document, width: int | None) -> list[Line]:
    """On one line, which the screen cuts, where there is no ``width`` to fill."""
    word, role = _severity(one)
    what, fix = text(one, "what") or "", text(one, "fix")
    head = line((f"{_INDENT}{word:<6}", role), (f"{text(one, 'check') or ''}: ", "strong"))
    if width is None:
        return [head + line(what, (f"; {fix}" if fix else "", "dim"))]
    indent = line(" " * (len(_INDENT) + 6))
    first, *more = wrap(what, max(20, width - head.cells))
    lines = [head + first, *(indent + one for one in more)]
    return lines + (hanging(indent + line(("fix: ", "title")), fix, width) if fix else [])


def doctor_lines(model: NodeModel, width: int) -> list[Line]:
    """Every finding with its reason, its fix and its time; then the GPUs."""
    cards = gpu_rows(model)
    return [*_findings(model.status, width), *([EMPTY, *cards] if cards else [])]


def _findings(status: Document | None, width: int) -> list[Line]:
    if dig(status, "doctor") is None:
        return [line((_not_there(status, "doctor"), "dim"))]
    at = fmt.moment(number(status, "doctor.at_unix_s"))
    lines = [line(f"{fmt.whole(number(status, 'doctor.checks'))} checks, last run at {at}")]
    error = text(status, "doctor.error")
    if error is not None:
        lines += hanging(line(("TROUBLE ", "bad")), error, width)
    for one in items(status, "doctor.findings"):
        word, role = _severity(one)
        lines.append(EMPTY)
        head = line((f"{word:<6}", role), (f"{text(one, 'check') or ''}  ", "strong"))
        lines += hanging(head, text(one, "what") or "", width)
        for name, words in (("why", text(one, "why")), ("fix", text(one, "fix"))):
            if words:
                lines += hanging(line((f"  {name}  ", "title")), words, width)
        lines.append(line(("  seen ", "dim"), (fmt.moment(number(one, "seen_unix_s")), "dim")))
    if not items(status, "doctor.findings"):
        lines.append(line(("no findings", "good")))
    return lines


def _severity(finding: Document) -> tuple[str, str]:
    told = text(finding, "severity") or "finding"
    return _SEVERITIES.get(told, (told, "warn"))


def _canary(status: object, width: int, context: ViewContext) -> list[Line]:
    """One line if nothing is wrong; else all details."""
    title = (f"{'canary':<9}", "title")
    state, sentence = text(status, "canary.state"), text(status, "canary.sentence") or ""
    if state is None:
        return [line(title, (_not_there(status, "canary"), "dim"))]
    good = state in ("ok", "off", "waiting")
    mark = context.glyphs.on if state == "ok" else context.glyphs.off
    role = "good" if state == "ok" else "dim" if good else "bad"
    head = line(title, (f"{mark} {state}  ", role))
    return [head + line(sentence)] if good else hanging(head, sentence, width)


def _journal(status: object, context: ViewContext) -> Line:
    title, glyphs = (f"{'journal':<9}", "title"), context.glyphs
    writing = dig(status, "journal.writing")
    if writing is None:
        return line(title, ("a recording" if dig(status, "recorded") else "not known", "dim"))
    state = f"{glyphs.on} writing" if writing else f"{glyphs.off} STOPPED"
    return line(
        title,
        (state, "good" if writing else "bad"),
        f", {fmt.whole(number(status, 'journal.written'))} records, "
        f"{fmt.whole(number(status, 'journal.dropped'))} dropped",
        (f": {text(status, 'journal.error')}" if text(status, "journal.error") else "", "bad"),
    )


def _not_there(status: object, name: str) -> str:
    if dig(status, "recorded"):
        return NOT_RECORDED
    return NOT_YET if isinstance(status, dict) and name in status else NOT_AVAILABLE
