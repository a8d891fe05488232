"""What is kept of a mismatch: the canary's tokens, where its pages were, what moved before.

A few small files in the state folder, readable by the group; the oldest go first. Of users
there is nothing in them: no tokens, no request names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hisparsed.canary.verdict import Verdict
from hisparsed.control.board import TickOutcome
from hisparsed.control.records import TickRecord
from hisparsed.control.state_file import write_state_file

FOLDER = "canary"
MOST_FILES = 8
_DECISIONS = 60
"""About the last ticks' worth of decisions, newest last."""
_FOLDER_MODE = 0o750


def evidence_document(
    verdict: Verdict, trigger: str, at_unix_s: float, last: TickOutcome, ticks: Iterable[TickRecord]
) -> dict[str, Any]:
    """Everything that is known of a mismatch, as plain JSON values."""
    report = last.report.model_dump(mode="json")
    del report["hot"]["requests"]
    sentences = [
        {
            "at_unix_s": tick.at_unix_s,
            "tick": tick.decision.tick,
            "lever": one.lever.value,
            "code": one.reason.value,
            "acts": one.acts,
            "sentence": one.sentence,
        }
        for tick in ticks
        for one in tick.decision.levers
        if one.acts or one.lever in tick.notable
    ]
    return {
        "at_unix_s": at_unix_s,
        "trigger": trigger,
        "sentence": verdict.sentence,
        "prompt_tokens": list(verdict.questions[0].prompt),
        "expected": list(verdict.expected),
        "answers": [
            run.model_dump(mode="json") | {"got": list(answer.tokens)}
            for run, answer in zip(verdict.runs(), verdict.answers, strict=True)
        ],
        "decisions": sentences[-_DECISIONS:],
        "report": report,
    }


def save_evidence(state_dir: Path, document: dict[str, Any]) -> Path:
    """Write one file, whole or not at all, and drop the oldest beyond ``MOST_FILES``.

    Raises ``OSError``.
    """
    folder = state_dir / FOLDER
    folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    milliseconds = int(document["at_unix_s"] * 1000)
    path = folder / f"mismatch-{milliseconds:015d}.json"
    write_state_file(path, json.dumps(document, indent=1).encode())
    for old in sorted(folder.glob("mismatch-*.json"))[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return path
