"""Documents of nodes, and one-off nodes for tests that end theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serve_process import NodeFiles, ServeProcess


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    """The documents of a node that is not started."""
    return NodeFiles(tmp_path / "node")


@pytest.fixture
def start() -> Iterator[Callable[[NodeFiles], ServeProcess]]:
    """Starts daemons that end with the test at the latest."""
    started: list[ServeProcess] = []

    def begin(files: NodeFiles) -> ServeProcess:
        started.append(ServeProcess(files))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
