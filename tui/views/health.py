"""The node's health: engine, doctor, canary and journal; and all that the doctor found."""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import EMPTY, Line, hanging, line, wrap
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.engine import engine_lines
from hisparsed.tui.views.gpus import gpu_rows, gpus_line
from hisparsed.tui.wire import Document, dig, items, number, text

NOT_AVAILABLE = "not available in this version"
NOT_YET = "not yet; it comes with the engine"
NOT_RECORDED = "not in a recorded journal; its events are on page 2"
_SEVERITIES = {"fatal": ("FATAL", "bad"), "warning": ("WARN", "warn"), "note": ("note", "dim")}
_INDENT = " " * 9
_WRAPPED = 3
"""Warnings and worse that are shown whole; more of them are a line each."""


def health_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Engine, doctor's findings a line each, canary and journal."""
    now_s = model.node_now_s(context.now_s)
    return [
        *engine_lines(model.status, now_s, width, context),
        *gpus_line(model, width, context),
        *_doctor(model.status, now_s, width),
        *_canary(model.status, width, context),
        _journal(model.status, context),
    ]


def _doctor(status: object, now_s: float | None, width: int) -> list[Line]:
    title = (f"{'doctor':<9}", "title")
    if dig(status, "doctor") is None:
        return [line(title, (_not_there(status, "doctor"), "dim"))]
    findings = items(status, "doctor.findings")
    looked_s, error = number(status, "doctor.at_unix_s"), text(status, "doctor.error")
    ago = fmt.UNKNOWN if now_s is None or looked_s is None else fmt.whole_duration(now_s - looked_s)
    when = ", looking again now" if dig(status, "doctor.looking") else f", looked {ago} ago"
    lines = []
    if findings:
        told = [text(one, "severity") for one in findings]
        counts = [
            (f"{count} {word}{'s' if count > 1 and plural else ''}  ", _SEVERITIES[word][1])
            for word, plural in (("fatal", False), ("warning", True), ("note", True))
            if (count := told.count(word))
        ]
        lines.append(line(title, *counts, (f"d has all{when}", "dim")))
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
    """Every finding with why it matters, what helps, and when it was seen; then the GPUs."""
    cards = gpu_rows(model)
    return [*_findings(model.status, width), *([EMPTY, *cards] if cards else [])]


def _findings(status: Document | None, width: int) -> list[Line]:
    if dig(status, "doctor") is None:
        return [line((_not_there(status, "doctor"), "dim"))]
    at = fmt.moment(number(status, "doctor.at_unix_s"))
    lines = [line(f"{fmt.whole(number(status, 'doctor.checks'))} checks, the last look at {at}")]
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
    """One line where all is well; all that there is to say where it is not."""
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
