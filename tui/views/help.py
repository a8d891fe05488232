"""The help page: keys by what they are for, and what the signs mean."""

from __future__ import annotations

from hisparsed.tui.glyphs import Glyphs
from hisparsed.tui.styled import EMPTY, Line, hanging, line

_KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "everywhere",
        (
            ("1 to 5", "overview, decisions, requests, policy, logs and health"),
            ("0", "the fleet page, when several nodes were named"),
            ("p", "pause: tables and charts stand still, the clock goes on"),
            ("w", "time that charts show: 5 minutes to 2 hours"),
            ("/", "search in this page; Escape ends it"),
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
            ("c", "only one reason code"),
            ("a", "every tick, or only moves and new reasons"),
        ),
    ),
    ("requests", (("s", "sort by the next column"), ("r", "the other way round"))),
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
            ("v", "from which level on"),
            ("o", "daemon, engine or both"),
            ("d", "all that the doctor found, with why and what helps"),
            ("D", "let the doctor look again"),
        ),
    ),
    (
        "recorded journal",
        (
            ("space", "play or stand still"),
            ("+, -", "faster, slower"),
            ("left, right", "30 seconds; with shift 10 minutes"),
            ("[, ]", "to the move before, the next move"),
        ),
    ),
)


def help_lines(glyphs: Glyphs, width: int) -> list[Line]:
    lines: list[Line] = []
    for title, keys in _KEYS:
        lines.append(line((title, "title")))
        for key, words in keys:
            lines += hanging(line((f"  {key:<16}", "strong")), words, width)
        lines.append(EMPTY)
    lines.append(line(("signs", "title")))
    for words in (
        f"{glyphs.in_use} in use  {glyphs.reusable} a reusable prefix  {glyphs.free} free",
        f"{glyphs.target} HiSparse target  {glyphs.other_target} offload target "
        "(one mark where they meet)",
        "P promised to the offload pool, D recalled from it, R reserve",
        "r resident, h hot, i indexer blocks on the GPU",
        "F full, M mixed, N no residency",
    ):
        lines += hanging(line("  "), words, width)
    return lines
