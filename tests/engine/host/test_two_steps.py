"""vLLM's asynchronous scheduler with two steps in flight, of every vLLM whose sources are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_trees import INSTALLED, environment_of, versions

PROGRAM = Path(__file__).parents[1] / "put_off_loads.py"

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("version", versions())
def test_a_load_of_an_earlier_lookup_finds_its_chunks(version: str, tmp_path: Path) -> None:
    over = tmp_path / "over"
    over.mkdir()
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment_of(version, over),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["steps"] == 2
    assert version == INSTALLED or found["itself"] == (version >= "0.33"), "who puts loads off"
    loaded = found["loaded"]
    assert loaded == {"no_move": 192, "shrink": 192, "evict": 192, "reset": 0, "abort": 0}
    assert "lock was left held" not in result.stderr + result.stdout
