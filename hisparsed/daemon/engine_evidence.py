"""What is kept of an engine that ended unasked: how, its last report, its log, what moved before.

A few small files in the state folder, readable by the group; the oldest go first. Of users there
is nothing in them: no prompts, no tokens, no request names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hisparsed.canary.evidence import recent_sentences
from hisparsed.control.board import TickOutcome
from hisparsed.control.log_ring import LogLine
from hisparsed.control.records import TickRecord, jsonable
from hisparsed.control.state_file import save_evidence_file
from hisparsed.control.status import Status

FOLDER = "engine-ends"
MOST_FILES = 8
MOST_LINES = 200
_TELLS_OF_REQUESTS = ("vllm.logging_utils.dump_input", "vllm.entrypoints")
"""Loggers of vLLM that may write down what requests hold."""


def evidence_document(
    why: str,
    at_unix_s: float,
    *,
    processes: Sequence[str],
    status: Status,
    last: TickOutcome | None,
    lines: Iterable[LogLine],
    ticks: Iterable[TickRecord],
) -> dict[str, Any]:
    """Everything that is known of the end, as plain JSON values; newest last."""
    report = None
    if last is not None:
        report = last.report.model_dump(mode="json")
        del report["hot"]["requests"]
    return {
        "at_unix_s": at_unix_s,
        "why": why,
        "processes": list(processes),
        "decisions": recent_sentences(ticks),
        "log": [
            line.model_dump() for line in lines if not line.logger.startswith(_TELLS_OF_REQUESTS)
        ][-MOST_LINES:],
        "report": report,
        "status": jsonable(status),
    }


def save_evidence(state_dir: Path, document: dict[str, Any]) -> Path:
    """Write one file, whole or not at all, and drop the oldest beyond ``MOST_FILES``.

    Raises ``OSError``.
    """
    return save_evidence_file(
        state_dir / FOLDER, "end", document["at_unix_s"], document, most=MOST_FILES
    )
