"""Ten kills with fixed seeds, and an engine that cannot end by itself."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparsed.node.engine.processes import orphans
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


def test_an_engine_that_is_stopped_when_its_daemon_is_killed_is_found_and_ended(
    folder: Path,
) -> None:
    files = NodeFiles(folder / "n")
    node = ServeProcess(files)
    try:
        node.wait_until_ready()
        engine = node.engine()
        engine.send_signal(signal.SIGSTOP)
        node.signal(signal.SIGKILL)
        node.wait()
        assert engine.pid in {one.pid for one in orphans(files.state_dir)}
        found = hisparsed("doctor", "--config", str(files.config_path))
        assert f"{engine.pid} (" in found.stdout
        assert str(files.socket) in found.stdout.replace("\n", "")
        assert "orphans" in found.stdout
        fixed = hisparsed("doctor", "--config", str(files.config_path), "--fix")
        assert "fixed    orphans" in fixed.stdout
        until("it has ended", lambda: not node.session_members())
        assert not files.socket.exists()
        assert "orphans" not in hisparsed("doctor", "--config", str(files.config_path)).stdout
    finally:
        node.kill()
