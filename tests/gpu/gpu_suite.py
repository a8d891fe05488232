"""The GPU suite's order of events: each step in a process of its own, in bounded time, all told.

Knows no GPU: what runs a step, tells the time and says what is missing comes in. One step that
fails, hangs or dies takes none of the others with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FORM = 1
"""Version of the JSON document's form."""
LEAST_S = 5.0
"""A step with less time than this left is not begun."""

Status = Literal["passed", "failed", "skipped"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """``run`` returns figures by name, units in their names; raises ``SkipError`` or anything else.

    ``limit_s``: seconds after which it is ended. ``needs``: names of what must be there.
    """

    name: str
    what: str
    limit_s: float
    run: Callable[[], Figures]
    needs: tuple[str, ...] = ("gpu",)


class SkipError(Exception):
    """A step that has nothing to do here; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What came of a step. ``reason`` is empty where it passed."""

    status: Status
    reason: str = ""
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """One step's entry in the document."""

    name: str
    what: str
    status: Status
    reason: str
    seconds: float
    figures: Figures


def outcome_of(step: Step) -> Outcome:
    """Run a step here and now; whatever it raises becomes a reason."""
    try:
        return Outcome("passed", figures=step.run())
    except SkipError as skip:
        return Outcome("skipped", str(skip))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")


def run_suite(
    steps: Sequence[Step],
    *,
    missing: Callable[[str], str | None],
    run_step: Callable[[Step, float], Outcome],
    clock_s: Callable[[], float],
    within_s: float,
    tell: Callable[[Told], None] = lambda told: None,
) -> dict[str, Any]:
    """The document of a run: JSON-ready, an entry for every step whatever happened.

    ``missing(need)`` says why a need is not met, or ``None``; ``run_step(step, seconds)`` runs one
    elsewhere, for at most so long. ``within_s``: for all steps together.
    """
    began_s = clock_s()
    entries: list[Told] = []
    for step in steps:
        step_began_s = clock_s()
        outcome = _attempt(step, missing, run_step, began_s + within_s - step_began_s)
        told = Told(
            step.name,
            step.what,
            outcome.status,
            outcome.reason,
            round(clock_s() - step_began_s, 3),
            outcome.figures,
        )
        entries.append(told)
        tell(told)
    counted = {status: sum(one.status == status for one in entries) for status in _STATUSES}
    return {
        "form": FORM,
        "seconds": round(clock_s() - began_s, 3),
        "summary": counted,
        "steps": [asdict(one) for one in entries],
    }


_STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")


def _attempt(
    step: Step,
    missing: Callable[[str], str | None],
    run_step: Callable[[Step, float], Outcome],
    left_s: float,
) -> Outcome:
    for need in step.needs:
        reason = missing(need)
        if reason is not None:
            return Outcome("skipped", reason)
    if left_s < LEAST_S:
        return Outcome("skipped", "the suite's time was over before this step")
    try:
        return run_step(step, min(step.limit_s, left_s))
    except Exception as error:
        return Outcome("failed", f"the step could not be run: {type(error).__name__}: {error}")
