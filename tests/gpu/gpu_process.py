"""Runs one step of the GPU suite in a process of its own and reads what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from gpu_suite import Outcome, Step

LAST_LINES = 6
LAST_BYTES = 4000


def write_outcome(path: Path, outcome: Outcome) -> None:
    """As JSON; what JSON does not know is written as text."""
    path.write_text(json.dumps(asdict(outcome), default=str))


def command_for(step: Step, answer: Path) -> list[str]:
    """This suite again, for one step."""
    here = Path(__file__).with_name("__main__.py")
    return [sys.executable, str(here), "--only", step.name, "--answer", str(answer)]


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
