"""What is kept of an engine that ended: enough to find the cause, nothing of users, no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hisparsed.control.status.document import (
    JournalStatus,
    Lifecycle,
    LoopStatus,
    NodeInfo,
    PolicyStatus,
    Status,
)
from hisparsed.logs.ring import LogLine
from hisparsed.node.engine.records import (
    FOLDER,
    MOST_FILES,
    MOST_LINES,
    evidence_document,
    save_evidence,
)
from hisparsed.policy.schema import Mode

STATUS = Status(
    at_unix_s=1.0,
    node=NodeInfo(
        kind="reference", model="any", version="1", api_url="", pid=1, started_unix_s=0.0
    ),
    lifecycle=Lifecycle.RESTARTING,
    observed=None,
    levers=[],
    policy=PolicyStatus(
        path="policy.yaml",
        generation=1,
        content_hash="",
        mode=Mode.ACT,
        overridden={},
        frozen=[],
        reload_failures=0,
        last_error=None,
    ),
    loop=LoopStatus(
        tick=0, tick_s=1.0, last_tick_s=0.0, late_ticks=0, failed_applies=0, failed_ticks=0
    ),
    journal=JournalStatus(writing=True, error=None, written=0, dropped=0),
    last_sentence=None,
    last_sentence_unix_s=None,
    events=[],
)


def line(number: int, logger: str = "vllm.v1.engine.core") -> LogLine:
    return LogLine(
        sequence=number,
        at_unix_s=float(number),
        source="engine",
        level=40,
        logger=logger,
        text=f"line {number}",
    )


def document(lines: list[LogLine], at_unix_s: float = 5.0) -> dict[str, Any]:
    return evidence_document(
        "killed", at_unix_s, processes=["one"], status=STATUS, last=None, lines=lines, ticks=[]
    )


def test_the_latest_log_lines_are_kept_oldest_first() -> None:
    kept = document([line(number) for number in range(MOST_LINES + 5)])["log"]
    assert [one["text"] for one in kept[:1] + kept[-1:]] == ["line 5", f"line {MOST_LINES + 4}"]
    assert len(kept) == MOST_LINES


def test_lines_that_may_tell_of_requests_are_left_out() -> None:
    lines = [line(1, "vllm.logging_utils.dump_input"), line(2, "vllm.entrypoints.logger"), line(3)]
    assert [one["text"] for one in document(lines)["log"]] == ["line 3"]


def test_the_end_and_the_state_of_the_node_are_in_it() -> None:
    found = document([])
    assert (found["why"], found["processes"], found["report"]) == ("killed", ["one"], None)
    assert found["status"]["lifecycle"] == "restarting"


def test_files_are_for_the_group_and_the_oldest_go_first(tmp_path: Path) -> None:
    paths = [save_evidence(tmp_path, document([], at_unix_s=float(n))) for n in range(10)]
    kept = sorted((tmp_path / FOLDER).iterdir())
    assert kept == paths[-MOST_FILES:]
    assert kept[0].stat().st_mode & 0o777 == 0o640
    assert json.loads(kept[-1].read_text())["at_unix_s"] == 9.0
