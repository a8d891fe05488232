"""The bench runs, gives every law work, and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys

from hisparsed.policy.bench import busy_policy, measure, snapshots
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Lever, Reason


def test_it_counts_ticks_and_moves() -> None:
    figures = measure(200)
    assert figures.ticks == 200
    assert 0 < figures.moves <= 200
    assert 0 < figures.decide_p50_us <= figures.decide_p99_us <= figures.decide_max_us


def test_its_node_has_work_for_the_laws() -> None:
    memory, codes = Memory(), set()
    for snapshot in snapshots(400):
        decision, memory = decide(busy_policy(), snapshot, memory)
        codes |= {one.reason for one in decision.levers}
    assert {Reason.SHARED_BY_GAIN, Reason.COVERAGE_LOW} <= codes
    assert "offload_gain_tokens_per_minute" in decision.of(Lever.SPLIT).figures


def test_json_on_the_command_line() -> None:
    command = [sys.executable, "-m", "hisparsed.policy.bench", "--json", "--ticks", "50"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["ticks"] == 50
