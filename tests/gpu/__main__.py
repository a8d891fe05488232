"""The GPU suite: `python -m tests.gpu` writes one JSON document and prints a table.

    python -m tests.gpu                        all steps, gpu-suite.json
    python -m tests.gpu --json out.json        another file
    python -m tests.gpu --kernels              the kernels alone: torch and Triton are enough
    python -m tests.gpu --kernels --rehearse   what of it a CPU can run, interpreted
    python -m tests.gpu --only kernels         one step, in this process

Exit code 0 when every step passed, or when there is no card, which is said in one line; 1 when a
step failed or did not run though a card is there. The steps for a second card may be skipped
without one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (HERE, ROOT):
    sys.path.insert(0, str(folder))

from gpu_suite import (  # noqa: E402
    Outcome,
    Step,
    Told,
    command_for,
    exit_code,
    outcome_of,
    run_in_process,
    run_suite,
    write_outcome,
)


def main() -> int:
    chosen = _arguments()
    if chosen.rehearse:
        # Triton reads it once, when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    options = [f"--{name}" for name in ("kernels", "rehearse") if getattr(chosen, name)]
    steps, missing, within_s = _kernels(chosen.rehearse) if chosen.kernels else _all_steps()
    if chosen.only is not None:
        return _one(next(one for one in steps if one.name == chosen.only), missing, chosen.answer)
    absent = None if chosen.rehearse else missing("gpu")
    if absent is not None:
        _say(f"No GPU to run on: {absent}; nothing was run.")
        return 0
    with TemporaryDirectory() as folder:
        document = run_suite(
            steps,
            missing=missing,
            run_step=lambda step, seconds: run_in_process(
                step, seconds, Path(folder), lambda one, path: command_for(one, path, *options)
            ),
            clock_s=time.monotonic,
            within_s=chosen.within or within_s,
            tell=_print,
        )
    document = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **document}
    chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    counted = ", ".join(f"{count} {status}" for status, count in document["summary"].items())
    _say(f"{counted} in {document['seconds']:.0f} s; {chosen.json}")
    optional = frozenset(
        one.name for one in steps if "two-gpus" in one.needs and missing("two-gpus")
    )
    return exit_code(document, optional=optional)


def _kernels(rehearse: bool) -> tuple[tuple[Step, ...], Callable[[str], str | None], float]:
    from kernel_steps import WITHIN_S, kernel_steps, why_missing

    return kernel_steps(rehearse=rehearse), cache(why_missing), WITHIN_S


def _all_steps() -> tuple[tuple[Step, ...], Callable[[str], str | None], float]:
    import conftest  # noqa: F401 (import paths and environment of the suite)
    from gpu_steps import STEPS, WITHIN_S, why_missing

    return STEPS, cache(why_missing), WITHIN_S


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-suite.json"))
    parser.add_argument("--within", type=float, help="seconds for all steps")
    parser.add_argument("--kernels", action="store_true", help="the kernels alone, without vLLM")
    parser.add_argument("--rehearse", action="store_true", help="with --kernels: on a CPU")
    parser.add_argument("--only", help="one step, in this process")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _one(step: Step, missing: Callable[[str], str | None], answer: Path | None) -> int:
    reasons = (missing(need) for need in step.needs)
    reason = next((reason for reason in reasons if reason), None)
    outcome = Outcome("skipped", reason) if reason else outcome_of(step)
    if answer is not None:
        write_outcome(answer, outcome)
    _say(f"{outcome.status} {outcome.reason} {json.dumps(outcome.figures, default=str)}")
    return 1 if outcome.status == "failed" else 0


def _print(told: Told) -> None:
    _say(f"{told.status:7} {told.seconds:7.1f} s  {told.name:24} {told.reason or told.what}")
    for name, value in told.figures.items():
        _say(f"{'':20}{name} = {value}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
