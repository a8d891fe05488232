"""The GPU suite's order of events: each step in its own process, in bounded time.

``run_suite`` knows no GPU: the runner of steps, the clock and the check of needs are passed in. One
step that fails, hangs or dies takes none of the others with it. ``run_in_process`` runs one step
and reads what it wrote; ``run_file`` makes a step of a test file, with pytest in this process and
figures by ``record_property``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
    """The result of a step. ``reason`` is empty where it passed."""

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
    elsewhere, for at most ``seconds``. ``within_s``: for all steps together.
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


def exit_code(document: dict[str, Any], *, optional: frozenset[str] = frozenset()) -> int:
    """1 where a step failed, or did not run though a card is there; ``optional`` ones may not.

    For suites that have found a card.
    """
    undone = [one for one in document["steps"] if one["status"] != "passed"]
    missed = [one for one in undone if one["status"] == "failed" or one["name"] not in optional]
    return 1 if missed else 0


LAST_LINES = 6
LAST_BYTES = 4000


def write_outcome(path: Path, outcome: Outcome) -> None:
    """As JSON; what JSON does not know is written as text."""
    path.write_text(json.dumps(asdict(outcome), default=str))


def command_for(step: Step, answer: Path, *options: str) -> list[str]:
    """This suite again, for one step; ``options`` say which suite."""
    here = Path(__file__).with_name("__main__.py")
    return [sys.executable, str(here), *options, "--only", step.name, "--answer", str(answer)]


def run_in_process(
    step: Step,
    seconds: float,
    folder: Path,
    command: Callable[[Step, Path], Sequence[str]] = command_for,
) -> Outcome:
    """The step's outcome; a step that is too slow or dies has failed, with its last lines.

    ``folder`` keeps its output. All processes that it has started end with it.
    """
    answer, output = folder / f"{step.name}.json", folder / f"{step.name}.log"
    answer.unlink(missing_ok=True)
    with output.open("wb") as log:
        process = subprocess.Popen(
            command(step, answer), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Outcome("failed", f"it took longer than {seconds:.0f} s; {_last(output)}")
        finally:
            _end_group(process)
    if not answer.exists():
        return Outcome("failed", f"it ended with {code} and no answer; {_last(output)}")
    return Outcome(**json.loads(answer.read_text()))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last(output: Path) -> str:
    text = output.read_bytes()[-LAST_BYTES:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
    return "its last lines: " + " | ".join(lines) if lines else "it wrote nothing"


HERE = Path(__file__).parent


class Tally:
    """A pytest plugin that counts outcomes and keeps recorded properties and first reasons."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[str] = []
        self.skips: list[str] = []
        self.figures: Figures = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid.rpartition('::')[2]}: {_reason(report)}")
        elif report.skipped:
            self.skips.append(_reason(report))
        elif report.when == "call":
            self.passed += 1
            self.figures |= dict(report.user_properties)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}: {_reason(report)}")


def run_file(path: Path) -> Figures:
    """What the file's tests recorded, and how many passed. Raises ``SkipError`` or a failure."""
    if not path.exists():
        raise SkipError(f"{path.name} is not there")
    import pytest

    tally = Tally()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(path)], plugins=[tally])
    if tally.failures:
        raise AssertionError(f"{len(tally.failures)} tests failed, first {tally.failures[0]}")
    if not tally.passed:
        raise SkipError(tally.skips[0] if tally.skips else f"no test ran, pytest ended with {code}")
    return {"tests_passed": tally.passed, "tests_skipped": len(tally.skips), **tally.figures}


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    # An assertion says most in its first line, an error at collection in its last.
    return lines[0] if crash is not None else lines[-1]
