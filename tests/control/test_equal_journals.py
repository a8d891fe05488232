"""A journal's text depends on what happened, and on nothing of the process that wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tui" / "recorded" / "tick.json"
WRITE_AGAIN = """
import sys
from hisparsed.control.records import SNAPSHOT_JSON
print(SNAPSHOT_JSON.dump_json(SNAPSHOT_JSON.validate_json(sys.stdin.buffer.read())).decode())
"""


def written(snapshot: bytes, hash_seed: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", WRITE_AGAIN],
        input=snapshot,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
    ).stdout.decode()


def test_a_snapshot_is_written_the_same_whatever_the_order_of_sets() -> None:
    snapshot = json.loads(RECORDED.read_text("utf-8"))["snapshot"]
    snapshot["frozen_levers"] = snapshot["live_levers"]
    texts = {written(json.dumps(snapshot).encode(), seed) for seed in (1, 2, 3)}
    assert len(texts) == 1
    assert json.loads(texts.pop())["live_levers"] == sorted(snapshot["live_levers"])
