"""What is kept of a mismatch: the canary's tokens, where its pages were, what moved before.

A few small files in the state folder, readable by the group; the oldest go first. Of users
there is nothing in them: no tokens, no request names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hisparsed.canary.verdict import Verdict
from hisparsed.control.board import TickOutcome
from hisparsed.control.records import TickRecord
from hisparsed.control.state_file import save_evidence_file

FOLDER = "canary"
MOST_FILES = 8
_DECISIONS = 60
"""About the last ticks' worth of decisions, newest last."""


def evidence_document(
    verdict: Verdict, trigger: str, at_unix_s: float, last: TickOutcome, ticks: Iterable[TickRecord]
) -> dict[str, Any]:
    """Everything that is known of a mismatch, as plain JSON values."""
    report = last.report.model_dump(mode="json")
    del report["hot"]["requests"]
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
        "decisions": recent_sentences(ticks),
        "report": report,
    }


def recent_sentences(ticks: Iterable[TickRecord]) -> list[dict[str, Any]]:
    """The latest decisions that act or say something new, newest last, as plain JSON values."""
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
    return sentences[-_DECISIONS:]


def save_evidence(state_dir: Path, document: dict[str, Any]) -> Path:
    """Write one file, whole or not at all, and drop the oldest beyond ``MOST_FILES``.

    Raises ``OSError``.
    """
    return save_evidence_file(
        state_dir / FOLDER, "mismatch", document["at_unix_s"], document, most=MOST_FILES
    )
