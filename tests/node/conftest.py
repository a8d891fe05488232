"""One real node for a file, and one-off nodes for tests that end their node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serve_process import AS_ON_CUDA, NodeFiles, NotifySocket, ServeProcess


@pytest.fixture(scope="module")
def notified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotifySocket]:
    """The service manager of ``node``."""
    with NotifySocket(tmp_path_factory.mktemp("manager") / "notify.sock") as manager:
        yield manager


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, notified: NotifySocket
) -> Iterator[ServeProcess]:
    """A serving reference node, shared by a file: each test leaves it as it was."""
    no_tools = {"tool_call_parser": None, "enable_auto_tool_choice": False}
    files = NodeFiles(tmp_path_factory.mktemp("node"), frontend_args=no_tools)
    served = ServeProcess(
        files, program=AS_ON_CUDA, NOTIFY_SOCKET=str(notified.path), WATCHDOG_USEC="4000000"
    )
    try:
        yield served.wait_until_ready()
    finally:
        served.kill()


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
