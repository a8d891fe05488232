"""What every page is drawn with, besides the node: characters, time, and the span of charts."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui.glyphs import UNICODE, Glyphs

SPANS_S = (300.0, 900.0, 3_600.0, 7_200.0)
"""What charts can show; a key goes from one to the next."""


@dataclass(frozen=True, slots=True)
class ViewContext:
    glyphs: Glyphs = UNICODE
    now_s: float = 0.0
    """This machine's Unix time; a recorded journal's own time while one is shown."""
    span_s: float = SPANS_S[0]
