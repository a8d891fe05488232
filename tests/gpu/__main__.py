"""The GPU suite: `python -m tests.gpu` writes one JSON document and prints a table.

    python -m tests.gpu                        all steps, ten minutes at most, gpu-suite.json
    python -m tests.gpu --json out.json        another file
    python -m tests.gpu --only kernels         one step, in this process

Exit code 1 when a step failed, 0 otherwise: steps that need a GPU are skipped without one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import conftest  # noqa: E402, F401 (import paths and environment of the suite)
from gpu_steps import (  # noqa: E402
    STEPS,
    WITHIN_S,
    why_no_gpu,
)
from gpu_suite import Outcome, Step, Told, outcome_of, run_in_process, run_suite, write_outcome  # noqa: E402  # noqa: E402


def main() -> int:
    chosen = _arguments()
    steps = [step for step in STEPS if chosen.only in (None, step.name)]
    if chosen.only is not None:
        return _one(steps[0], chosen.answer)
    with TemporaryDirectory() as folder:
        document = run_suite(
            steps,
            missing=_missing,
            run_step=lambda step, seconds: run_in_process(step, seconds, Path(folder)),
            clock_s=time.monotonic,
            within_s=chosen.within,
            tell=_print,
        )
    document = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **document}
    chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    counted = ", ".join(f"{count} {status}" for status, count in document["summary"].items())
    _say(f"{counted} in {document['seconds']:.0f} s; {chosen.json}")
    return 1 if document["summary"]["failed"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-suite.json"))
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds for all steps")
    parser.add_argument("--only", choices=[step.name for step in STEPS])
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _one(step: Step, answer: Path | None) -> int:
    reasons = (_missing(need) for need in step.needs)
    reason = next((reason for reason in reasons if reason), None)
    outcome = Outcome("skipped", reason) if reason else outcome_of(step)
    if answer is not None:
        write_outcome(answer, outcome)
    _say(f"{outcome.status} {outcome.reason} {json.dumps(outcome.figures, default=str)}")
    return 1 if outcome.status == "failed" else 0


@cache
def _missing(need: str) -> str | None:
    return {"gpu": why_no_gpu}[need]()


def _print(told: Told) -> None:
    _say(f"{told.status:7} {told.seconds:7.1f} s  {told.name:24} {told.reason or told.what}")
    for name, value in told.figures.items():
        _say(f"{'':20}{name} = {value}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
