"""Whether vLLM's faults of docs/upstream.md still show, so that our workarounds can go when not.

One process per version runs every reproduction. ``known.py`` says what to expect of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.vllm_trees import environment_of, versions
from tests.upstream.known import FAULTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "upstream.md").read_text("utf-8")


def test_every_reproduction_is_on_the_page_and_is_run() -> None:
    programs = {path.stem for path in HERE.glob("*.py") if "\ndef reproduce(" in path.read_text()}
    assert programs == {fault.name for fault in FAULTS}
    missing = [name for name in programs if f"tests.upstream.{name}`" not in PAGE]
    assert not missing


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", versions())
def test_each_fault_shows_in_the_versions_that_have_it(version: str, tmp_path: Path) -> None:
    """Where one is fixed: give it ``fixed_in``, and take our workaround out for newer versions."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
        cwd=ROOT,
        env=environment_of(version, tmp_path),
    )
    assert done.stdout, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    shown = {name: bool(sentence) for name, sentence in answer["found"].items()}
    assert shown == {fault.name: fault.is_in(answer["version"]) for fault in FAULTS}
