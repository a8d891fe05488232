"""What the doctor found: how bad it is, what it means and how to put it right; and how it is told.

Not here: any looking.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hisparsed.control.status_doctor import Severity
from hisparsed.policy.units import counted

EXIT_SOUND = 0
EXIT_WARNINGS = 1
EXIT_FATAL = 3
"""2 is wrong input, as of every command."""
_WIDTH = 100
_LEAST_WIDTH = 40
_INDENT = " " * 24


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """A stable name for scripts, such as `memlock`."""
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    fixed: bool = False
    """Was put right just now."""


def exit_code(findings: Sequence[Finding], *, fatal_only: bool) -> int:
    """0 sound, 1 warnings, 3 fatal; what was put right counts no more."""
    open_ones = {one.severity for one in findings if not one.fixed}
    if Severity.FATAL in open_ones:
        return EXIT_FATAL
    if Severity.WARNING in open_ones and not fatal_only:
        return EXIT_WARNINGS
    return EXIT_SOUND


def findings_document(findings: Sequence[Finding], *, node: str) -> dict[str, Any]:
    """For machines; keys are stable."""
    counts = {
        severity.value: sum(one.severity is severity and not one.fixed for one in findings)
        for severity in Severity
    }
    return {"node": node, "counts": counts, "findings": [asdict(one) for one in findings]}


def findings_text(
    findings: Sequence[Finding], *, node: str, every: bool, width: int = _WIDTH
) -> str:
    """For people: the worst first, with why and how; ``every`` also lists what is well.

    What is longer than ``width`` goes on below itself.
    """
    order = list(reversed(Severity))
    lines = []
    for one in sorted(findings, key=lambda one: (one.fixed, order.index(one.severity))):
        if one.severity is Severity.OK and not every:
            continue
        word = "fixed" if one.fixed else one.severity.value
        lines += _below(f"{word:8} {one.check:14} ", one.what, width)
        lines += _below(f"{_INDENT}why: ", one.why, width) if one.why else []
        lines += _below(f"{_INDENT}fix: ", one.fix, width) if one.fix and not one.fixed else []
    return "\n".join([*lines, _summary(findings, node)]) + "\n"


def _below(start: str, text: str, width: int) -> list[str]:
    """``text`` after ``start`` and, where it is longer, in the same column below."""
    first, *more = textwrap.wrap(
        text,
        max(width - len(start), _LEAST_WIDTH),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [start + first, *(" " * len(start) + line for line in more)]


def _summary(findings: Sequence[Finding], node: str) -> str:
    def count(severity: Severity) -> int:
        return sum(one.severity is severity and not one.fixed for one in findings)

    fixed = sum(one.fixed for one in findings)
    put_right = f", {fixed} put right" if fixed else ""
    return (
        f"{node}: {counted(len({one.check for one in findings}), 'check')}, "
        f"{count(Severity.FATAL)} fatal, {counted(count(Severity.WARNING), 'warning')}{put_right}."
    )
