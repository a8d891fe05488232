"""The engine's life as lines of text, for `hisparsed status` and `hisparsed engine show`. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hisparsed.control.status_engine import EngineLifeStatus, EngineState
from hisparsed.policy.units import counted, format_duration


def engine_lines(life: EngineLifeStatus) -> Iterator[str]:
    """One line where all is well and always was; more where there is more to know."""
    restarts = counted(life.restarts_total, "restart")
    counts = f"{restarts}, {life.planned_restarts_total} of them asked for"
    took = ""
    if life.last_start_s is not None:
        took = f", the last start took {format_duration(max(1, round(life.last_start_s)))}"
    mark = "" if life.state in (EngineState.SERVING, EngineState.STARTING) else "!! "
    yield f"engine     {mark}{life.sentence}; {counts}{took}"
    last = life.last_exit
    if last is not None:
        how = f" ({'; '.join(last.processes)})" if last.processes else ""
        kept = f"; evidence: {last.evidence}" if last.evidence else ""
        yield f"  LAST END {last.why}{how}{kept}"
    if life.quarantined is not None:
        keys = ", ".join(
            f"{one.key} {one.wanted} (runs {one.running})" for one in life.quarantined.changes
        )
        yield f"  PUT ASIDE {keys or 'changed values'}: {life.quarantined.error}"
