"""The demo for real, short: two daemons, real vLLM, one JSON object on the last line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_the_demo_ends_with_its_summary_and_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hisparsed", "demo", "--for", "6s", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["requests"] == document["policy_off"]["requests"] > 0
    assert document["failed"] == document["policy_off"]["failed"] == 0
    assert document["token_differences"] == 0
    assert document["compared"] == document["requests"]
    for key in ("pool_moves", "multiplier_changes", "prefix_hit_tokens", "seconds"):
        assert key in document
        assert key in document["policy_off"]
    assert document["policy_off"]["pool_moves"] == 0
    assert document["policy_off"]["multiplier_changes"] == 0
    assert "Traceback" not in done.stderr
