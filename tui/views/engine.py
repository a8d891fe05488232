"""The engine's life, where the node tells it: serving, starting, draining, restarting, failed.

Pure. Nodes of earlier versions tell nothing of it; then nothing is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.tui import format as fmt
from hisparsed.tui.styled import Line, hanging, line, wrap
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.wire import items, number, text

_TITLE = (f"{'engine':<9}", "title")
_INDENT = " " * 9
_WITH_ENGINE = ("serving", "draining")
_OVER = ("failed", "stopped")


@dataclass(frozen=True, slots=True)
class EngineLife:
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


def engine_life(status: object) -> EngineLife | None:
    """``None`` where the node does not tell."""
    state = text(status, "engine.state")
    if state is None:
        return None
    return EngineLife(
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
    """State and times; then the last end, and what was put aside because it did not start."""
    life = engine_life(status)
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
        (f"{_INDENT}PUT ASIDE ", "bad"), f"at {at}: {changes or 'values'} did not start; "
        "the last good ones are in force"
    )  # fmt: skip
    room = max(20, width - len(_INDENT))
    return [head, *(line(_INDENT) + one for one in wrap(error, room, "bad"))]
