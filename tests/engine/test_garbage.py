"""Collections are rare while vLLM is imported, and as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import hisparsed.__main__
from hisparsed.engine.garbage import collect_as_usual, collect_rarely


def test_they_are_rare_for_a_while() -> None:
    usual = gc.get_threshold()
    collect_rarely()
    try:
        assert gc.get_threshold()[0] > 100 * usual[0]
    finally:
        collect_as_usual()
    assert gc.get_threshold() == usual


def test_values_of_somebody_else_are_kept() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(123, 4, 5)
    try:
        collect_as_usual()
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*usual)


def printed(code: str, *words: str) -> str:
    """By a separate process."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(("words", "rare"), [((), False), (("--multiprocessing-fork",), True)])
def test_a_spawned_process_has_rare_ones_before_it_imports_vllm(
    words: tuple[str, ...], rare: bool
) -> None:
    code = "import gc, sys, hisparsed.cli.app; print(gc.get_threshold()[0], 'vllm' in sys.modules)"
    assert printed(code, *words) == f"{100_000 if rare else 700} False"


def test_processes_that_the_daemon_begins_import_its_program_first() -> None:
    code = (
        "import runpy\n"
        "from multiprocessing.spawn import get_preparation_data\n"
        "from hisparsed.cli import app\n"
        "app.main = lambda: print(get_preparation_data('engine').get('init_main_from_path'))\n"
        "runpy._run_module_as_main('hisparsed')\n"
    )
    assert Path(printed(code)) == Path(hisparsed.__main__.__file__)
