"""The characters that bars, charts and frames are made of: Unicode, or ASCII for plain terminals.

Every state has a character of its own, so that a bar reads without colour.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    levels: str
    """From nothing to a full cell, for charts."""
    in_use: str
    reusable: str
    free: str
    boundary: str
    target: str
    other_target: str
    frame: tuple[str, str, str, str, str, str]
    """Corners (top left, top right, bottom left, bottom right), horizontal, vertical."""
    more: str
    arrow: str
    sort_up: str
    sort_down: str
    on: str
    off: str
    dot: str


UNICODE = Glyphs(
    levels=" ▁▂▃▄▅▆▇█",
    in_use="█",
    reusable="▒",
    free="·",
    boundary="┃",
    target="▼",
    other_target="▽",
    frame=("╭", "╮", "╰", "╯", "─", "│"),
    more="…",
    arrow="→",
    sort_up="▲",
    sort_down="▼",
    on="●",
    off="○",
    dot="·",
)
ASCII = Glyphs(
    levels=" .:-=+*%#",
    in_use="#",
    reusable="=",
    free=".",
    boundary="|",
    target="v",
    other_target="y",
    frame=("+", "+", "+", "+", "-", "|"),
    more="~",
    arrow="->",
    sort_up="^",
    sort_down="v",
    on="*",
    off="o",
    dot="-",
)
