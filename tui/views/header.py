"""The frame of every page: the two lines on top, the line of pages below them, and the help.

The help lists the keys by purpose and explains the symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.tui import format as fmt
from hisparsed.tui.model import Connection, NodeModel
from hisparsed.tui.styled import EMPTY, Line, beside, block, ends, fit, hanging, line
from hisparsed.tui.views.drawing import Glyphs, ViewContext
from hisparsed.tui.views.health import engine_summary
from hisparsed.tui.views.policy import effective_mode
from hisparsed.tui.wire import dig, number, text

_LIFECYCLE_ROLES = {
    "serving": "good",
    "starting": "warn",
    "draining": "warn",
    "restarting": "warn",
}


@dataclass(frozen=True, slots=True)
class Banner:
    """Texts from the application; empty ones are not shown."""

    paused_at_s: float | None = None
    readonly: bool = False
    notice: str = ""
    player: str = ""


def header_lines(model: NodeModel, banner: Banner, width: int, context: ViewContext) -> list[Line]:
    """Node, model, version, health, generation and mode; then unusual states."""
    status, glyphs = model.status, context.glyphs
    lifecycle = text(status, "lifecycle") or "unknown"
    if model.stale:
        lifecycle = model.link.value
    role = "bad" if model.stale else _LIFECYCLE_ROLES.get(lifecycle, "bad")
    started, at_s = number(status, "node.started_unix_s"), model.node_time_s
    up = fmt.UNKNOWN
    if started and at_s:
        # A node whose engine starts sends no status, and its time continues.
        passed_s = 0.0 if model.stale else _since_status(model, context)
        up = fmt.whole_duration(at_s - started + passed_s)
    kind, served = text(status, "node.kind") or "", text(status, "node.model") or ""
    mode, version = effective_mode(model), text(status, "node.version")
    left = line(
        (f"{model.name} ", "title"),
        (f"{glyphs.on if lifecycle == 'serving' else glyphs.off} {lifecycle}", role),
        (f"  {served}", "strong"),
        (f" {kind}" if kind and kind not in served else "", "dim"),
        (f"  up {up}", "dim"),
        (f"  gen {model.generation}" if model.generation is not None else "", "dim"),
        (f" mode {mode}" if mode else "", "dim"),
        (f"  hisparsed {version}" if version and width >= 110 else "", "dim"),
    )
    right = line((f" {fmt.clock(context.now_s)}", "strong"))
    return [ends(left, right, width), _second(model, banner, width, context)]


def _second(model: NodeModel, banner: Banner, width: int, context: ViewContext) -> Line:
    """The most urgent first: a lost connection, then frozen or limited levers, then health."""
    marks = [
        (" PAUSED since " + fmt.clock(banner.paused_at_s) + " ", "alert")
        if banner.paused_at_s is not None
        else ("", ""),
        (" READ-ONLY ", "badge") if banner.readonly else ("", ""),
    ]
    right = line(*marks)
    if banner.player:
        return ends(line((banner.player, "accent")), right, width)
    if model.link is Connection.LOST:
        since = fmt.clock(model.link_since_s)
        why = model.link_why.removeprefix(f"{model.address}: ")
        what = "never reached" if model.status is None else f"disconnected since {since}"
        return ends(line((f"{what}: {why}", "bad")), right, width)
    if model.link is Connection.CONNECTING:
        return ends(line((f"connecting to {model.address} ...", "warn")), right, width)
    if banner.notice:
        return ends(line((banner.notice, "accent")), right, width)
    return ends(_health(model, context), right, width)


def _since_status(model: NodeModel, context: ViewContext) -> float:
    received_s = model.status_received_s
    return 0.0 if received_s is None else max(0.0, context.now_s - received_s)


def _health(model: NodeModel, context: ViewContext) -> Line:
    status = model.status
    life = engine_summary(status)
    if life is not None and life.state != "serving":
        return line(
            (life.words(model.node_now_s(context.now_s)), life.role),
            (f": {life.why}" if life.why and not life.has_engine else "", life.role),
        )
    if not model.observed:
        return line(("the engine has not reported yet; it may be starting", "warn"))
    age_s, tick_s = number(status, "observed.report_age_s"), number(status, "loop.tick_s")
    cost_s = number(status, "observed.report_cost_s")
    # Between two status documents the report gets older, and the shown age follows.
    if age_s is not None:
        age_s += _since_status(model, context)
    old = age_s is not None and age_s > max(5.0, 5 * (tick_s or 1.0))
    parts = [
        (f"report {fmt.duration(age_s)} ago", "bad" if old else "dim"),
        (" OLD" if old else "", "bad"),
    ]
    for path, noun, what in (
        ("loop.failed_ticks", "tick", "failed"),
        ("loop.failed_applies", "command", "refused"),
        ("loop.failed_reports", "report", "failed"),
    ):
        count = number(status, path)
        if count:
            parts.append((f"  {fmt.counted(count, noun)} {what}", "bad"))
    if dig(status, "engine.quarantined") is not None:
        parts.append(("  VALUES QUARANTINED", "bad"))
    if text(status, "policy.last_error"):
        parts.append(("  POLICY REJECTED", "bad"))
    if dig(status, "journal.writing") is False:
        parts.append(("  JOURNAL STOPPED", "bad"))
    frozen = dig(status, "policy.frozen")
    if isinstance(frozen, list) and frozen:
        parts.append((f"  FROZEN: {', '.join(map(str, frozen))}", "warn"))
    if number(status, "doctor.fatal"):
        parts.append(("  DOCTOR: FATAL", "bad"))
    elif warnings := number(status, "doctor.warnings"):
        parts.append((f"  doctor: {fmt.counted(warnings, 'warning')}", "warn"))
    parts += [
        (f"  tick {fmt.whole(number(status, 'loop.tick'))}", "dim"),
        (f" took {fmt.duration(number(status, 'loop.last_tick_s'))}", "dim"),
        (f", report cost {fmt.duration(cost_s)}", "dim"),
    ]
    return line(*parts)


@dataclass(frozen=True, slots=True)
class PageTab:
    key: str
    title: str
    name: str


def tab_line(tabs: tuple[PageTab, ...], current: str, width: int) -> Line:
    """Pages with their keys; the current one in brackets."""
    parts: list[tuple[str, str]] = []
    for tab in tabs:
        here = tab.name == current
        label = f"[{tab.key} {tab.title}]" if here else f" {tab.key} {tab.title} "
        parts.append((label, "tab" if here else "dim"))
    return fit(line(*parts), width)


def tab_at(tabs: tuple[PageTab, ...], x: int) -> str | None:
    """The page whose tab is at a column."""
    end = 0
    for tab in tabs:
        end += len(tab.key) + len(tab.title) + 3
        if x < end:
            return tab.name
    return None


_KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "everywhere",
        (
            ("1 to 5", "overview, decisions, requests, policy, logs and health"),
            ("0", "the fleet page, when several nodes were named"),
            ("p", "pause: tables and charts stop, the clock continues"),
            ("w", "time that charts show: 5 minutes to 2 hours"),
            ("/", "search in this page; Escape ends it"),
            ("Z", "freeze all levers, or thaw them; it asks first"),
            ("T", "next theme"),
            ("ctrl+p", "command palette: everything by name"),
            ("?", "this help"),
            ("q", "quit"),
        ),
    ),
    (
        "tables",
        (
            ("up, down, j, k", "move; Page Up, Page Down, g and G for more"),
            ("Enter", "open; on the policy page: set a value"),
        ),
    ),
    (
        "decisions",
        (
            ("l", "next lever"),
            ("f", "fold holds that change their reason often, or show each"),
            ("c", "only one reason code"),
            ("a", "every tick, or only moves and new reasons"),
        ),
    ),
    ("requests", (("s", "sort by the next column"), ("r", "reverse the order"))),
    (
        "policy (every change asks first)",
        (
            ("e", "set the value under the cursor, for a time or until unset"),
            ("u", "unset it"),
            ("z", "freeze or thaw a lever"),
            ("m", "mode of a lever: act, advise, off"),
            ("R", "reload the policy file"),
        ),
    ),
    (
        "logs and health",
        (
            ("v", "lowest level that is shown"),
            ("o", "daemon, engine or both"),
            ("f", "fold lines that repeat, or show each"),
            ("d", "all findings of the doctor, with reason and fix"),
            ("D", "run the doctor again"),
        ),
    ),
    (
        "recorded journal",
        (
            ("space", "play or pause"),
            ("+, -", "faster, slower"),
            ("left, right", "30 seconds; with shift 10 minutes"),
            ("[, ]", "previous move, next move"),
        ),
    ),
)


_HELP_COLUMN = 76
"""Cells of the keys with their longest words."""


def help_lines(glyphs: Glyphs, width: int) -> list[Line]:
    """In two columns where they fit."""
    if width < 2 * _HELP_COLUMN:
        return [*_key_lines(_KEYS, width), *_symbol_lines(glyphs, width)]
    half = _key_lines(_KEYS[:3], _HELP_COLUMN)
    other = [*_key_lines(_KEYS[3:], _HELP_COLUMN), *_symbol_lines(glyphs, _HELP_COLUMN)]
    height = max(len(half), len(other))
    return beside(block(one, _HELP_COLUMN, height) for one in (half, other))


def _key_lines(sections: Sequence[tuple[str, Sequence[tuple[str, str]]]], width: int) -> list[Line]:
    lines: list[Line] = []
    for title, keys in sections:
        lines.append(line((title, "title")))
        for key, words in keys:
            lines += hanging(line((f"  {key:<16}", "strong")), words, width)
        lines.append(EMPTY)
    return lines


def _symbol_lines(glyphs: Glyphs, width: int) -> list[Line]:
    lines = [line(("symbols", "title"))]
    for words in (
        f"{glyphs.in_use} in use  {glyphs.reusable} a reusable prefix  {glyphs.free} free",
        f"{glyphs.target} HiSparse target  {glyphs.other_target} offload target "
        "(one mark where they meet)",
        "P assigned to the offload pool, D recalled from it, R reserve",
        "r resident, h hot, i indexer blocks on the GPU",
        "F full, M mixed, N no residency",
    ):
        lines += hanging(line("  "), words, width)
    return lines
