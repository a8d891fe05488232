"""The levers: mode, what is in force, what is wanted and why it does not move."""

from __future__ import annotations

from hisparsed.tui import format as fmt
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line, fit, line, wrap
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import Document, dig, items, number, text

LEVERS = ("split", "multiplier", "admission", "watermark")


def lever_lines(model: NodeModel, width: int, context: ViewContext, *, rows: int = 1) -> list[Line]:
    """A line a lever; with more rows each its sentence below."""
    found = items(model.status, "levers")
    if not found:
        return [line(("no decision yet", "dim"))]
    settings = [_setting(model, lever, context) for lever in found]
    column = max(len(one) for one in settings)
    lines: list[Line] = []
    for lever, setting in zip(found, settings, strict=True):
        lever_line = _lever_line(lever, f"{setting:<{column}}")
        lines.append(fit(lever_line, width, more=context.glyphs.more))
        if rows > 1:
            sentence = wrap(text(lever, "sentence") or "", width - 2, "dim")[: rows - 1]
            lines += [line("  ") + one for one in sentence]
    return lines


def _setting(model: NodeModel, lever: Document, context: ViewContext) -> str:
    """What is in force, and where it is to go."""
    current, wanted = dig(lever, "current"), dig(lever, "wanted")
    name = text(lever, "lever") or ""
    shown = _shown(model, name, current)
    if wanted == current:
        return shown
    return f"{shown} {context.glyphs.arrow} {_shown(model, name, wanted)}"


def _lever_line(lever: Document, setting: str) -> Line:
    mode, reason = text(lever, "mode") or "", text(lever, "reason") or ""
    name = text(lever, "lever") or ""
    moves = dig(lever, "current") != dig(lever, "wanted")
    limited = text(lever, "limited_by")
    return line(
        (f"{name:<11}", "title"),
        (f"{mode:<7}", "" if mode == "act" else "warn"),
        (f"{setting}  ", "strong"),
        (reason, "accent" if moves else ""),
        (f" (limited: {limited})" if limited and limited != reason else "", "dim"),
        (" FROZEN" if dig(lever, "frozen") else "", "warn"),
        (" NEEDS RESTART" if dig(lever, "pending_restart") else "", "warn"),
    )


def _shown(model: NodeModel, lever: str, value: object) -> str:
    if lever == "multiplier" and isinstance(value, int | float):
        return fmt.multiplier(value)
    if lever == "split" and isinstance(value, int | float):
        block = number(model.observed, "pools.host_block_bytes")
        whole = f"{value:,.0f}"
        return f"{whole} ({fmt.size(value * block)})" if block else whole
    return fmt.setting(value)


def setting_text(model: NodeModel, lever: str, value: object) -> str:
    """A lever's value with its size where it has one."""
    return _shown(model, lever, value)
