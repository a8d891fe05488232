"""Ten kills with fixed seeds, and an engine that cannot end without help."""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hisparsed.node.engine.processes import STATE_ENV, orphans
from tests.crash.kills import Crashes, NodeFiles, ServeProcess, hisparsed, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="c-") as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_kill_leaves_nothing(folder: Path, seed: int) -> None:
    crashes = Crashes(folder, random.Random(seed))
    try:
        crashes.kill()
    finally:
        crashes.close()


def engines(node: ServeProcess) -> Iterator[psutil.Process]:
    return (one for one in node.children() if "EngineCore" in one.name())


@pytest.mark.long
def test_an_engine_that_begins_when_its_daemon_is_killed_ends_by_itself(folder: Path) -> None:
    """vLLM's own would wait five minutes for a daemon that does not answer its first words."""
    node = ServeProcess(NodeFiles(folder / "n"))
    try:
        until("it has begun", lambda: next(spawned(node), None), timeout_s=300)
        node.signal(signal.SIGKILL)
        until("it has ended", lambda: not node.session_members(), timeout_s=200)
    finally:
        node.kill()


def spawned(node: ServeProcess) -> Iterator[psutil.Process]:
    for one in node.children():
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(one.cmdline()):
                yield one


@pytest.mark.long
@pytest.mark.parametrize("begins", [False, True])
def test_an_engine_that_is_stopped_when_its_daemon_is_killed_outlives_no_sweep(
    folder: Path, begins: bool
) -> None:
    """The kernel wakes what is stopped in a process group that lost its parent; or it is ended.

    One that ``begins`` is still in the daemon's group.
    """
    files = NodeFiles(folder / "n")
    node = ServeProcess(files)
    try:
        if begins:
            engine = until("it has its name", lambda: next(engines(node), None), timeout_s=300)
        else:
            engine = node.wait_until_ready().engine()
        environ = engine.environ()
        assert environ[STATE_ENV] == str(files.state_dir), "it can be told from other processes"
        engine.send_signal(signal.SIGSTOP)
        node.signal(signal.SIGKILL)
        node.wait()
        fixed = hisparsed("doctor", "--config", str(files.config_path), "--fix")
        assert "fixed    dead-daemon" in fixed.stdout
        until("the engine has ended", lambda: not node.session_members())
        assert orphans(files.state_dir) == []
        assert not files.socket.exists()
        assert not (files.state_dir / "runtime-folder").exists()
    finally:
        node.kill()
