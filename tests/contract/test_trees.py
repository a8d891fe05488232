"""The sources of every tested vLLM, as its CUDA wheels have them: read again, and run on a CPU.

Runs where `make contract` has fetched them; their compiled parts are not needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hisparsed.engine.compat.replaced import KNOWN, replaced_digest
from hisparsed.engine.compat.versions import TESTED, installed_vllm
from tests.contract.source_tree import SourceTree
from tests.contract.surface import Place, read_surface
from tests.contract.touched import all_touched

OTHERS = [version for version in TESTED if version != installed_vllm()]
RUN = Path(__file__).parent / "reference_run.py"


@pytest.mark.parametrize("version", TESTED)
def test_the_sources_are_those_of_the_snapshot(
    version: str, tree_of: Callable[[str], Path], snapshot: Callable[[str], dict[str, Place]]
) -> None:
    found = read_surface(SourceTree(tree_of(version)), all_touched())

    known = snapshot(version)
    differing = [
        target for target in sorted({*found, *known}) if found.get(target) != known.get(target)
    ]
    assert differing == [], "`make snapshots` reads them anew"


@pytest.mark.parametrize("version", TESTED)
def test_pages_are_kept_whole_where_their_bookkeeping_is_known(
    version: str, tree_of: Callable[[str], Path]
) -> None:
    tree = tree_of(version)

    def text(module: str) -> str:
        return (tree.parent / f"{module.replace('.', '/')}.py").read_text("utf-8")

    assert (replaced_digest(text) in KNOWN) == (version >= "0.32")


@pytest.fixture(scope="module")
def other_tree(version: str, tree_of: Callable[[str], Path]) -> Path:
    return tree_of(version)


@pytest.fixture(scope="module")
def on_installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("installed"), None)


@pytest.mark.engine
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("version", OTHERS, scope="module")
def test_the_reference_node_gives_the_same_tokens_on_it(
    version: str, other_tree: Path, on_installed: dict[str, Any], tmp_path: Path
) -> None:
    over = over_installed_libraries(other_tree, tmp_path / "over")

    found = run(tmp_path, over)

    assert found["vllm"] == version
    assert found["violations"] == []
    assert found["prefix_hits"] > 0
    assert found["host_only_pages"] > 0
    assert found["tokens"] == on_installed["tokens"]


def over_installed_libraries(tree: Path, folder: Path) -> Path:
    """A package of ``tree``'s sources and the installed vLLM's compiled parts."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = folder / "vllm"
    package.mkdir(parents=True)
    for entry in (*tree.iterdir(), *Path(spec.origin).parent.glob("*.so")):
        (package / entry.name).symlink_to(entry)
    return folder


def run(folder: Path, path: Path | None) -> dict[str, Any]:
    # The installed distribution's metadata is of another version, so the target is named.
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    state = folder / "state"
    done = subprocess.run(
        [sys.executable, str(RUN), str(state)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
