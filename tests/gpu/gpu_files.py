"""Test files as steps of the suite: pytest in this process, its figures by ``record_property``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_suite import Figures, SkipError

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
