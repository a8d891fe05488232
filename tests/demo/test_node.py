"""The demo's nodes end with it, also those that do not listen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hisparsed.demo import node as demo_node
from hisparsed.demo.node import DemoNode, DemoSettings, end_nodes
from hisparsed.errors import UserError

DEAF = """#!/bin/sh
trap '' TERM INT
sleep 300 &
echo $! > "$TMPDIR/begun"
wait
"""
"""Instead of a daemon with its engine: both ignore signals. The fifo shows that both run."""


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], DemoNode]]:
    """Makes a begun node of that kind."""
    program = tmp_path / "python"
    program.write_text(DEAF)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    begun: list[DemoNode] = []

    def make(name: str) -> DemoNode:
        node = DemoNode(DemoSettings(), tmp_path / name, "act")
        os.mkfifo(tmp_path / name / "begun")
        node.begin()
        begun.append(node)
        with (tmp_path / name / "begun").open() as fifo:
            fifo.read()
        return node

    yield make
    for node in begun:
        node.kill()


def alive() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_nodes_that_do_not_listen_are_killed_with_their_engines(
    deaf: Callable[[str], DemoNode],
) -> None:
    before = alive()
    nodes = [deaf("on"), deaf("off")]
    begun = [one for one in alive() if one not in before]
    assert len(begun) == 4
    end_nodes(nodes, 0.05)
    _, left = psutil.wait_procs(begun, timeout=5)
    assert not left


def test_an_interrupt_of_the_wait_kills_at_once(
    deaf: Callable[[str], DemoNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alive()
    node = deaf("on")
    begun = [one for one in alive() if one not in before]

    def second_interrupt(within_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(node, "wait_for_end", second_interrupt)
    with pytest.raises(KeyboardInterrupt):
        end_nodes([node], 60.0)
    _, left = psutil.wait_procs(begun, timeout=5)
    assert not left


def test_a_node_that_ended_says_how_its_log_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no room\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    node = DemoNode(DemoSettings(), tmp_path / "on", "act")
    node.begin()
    node.wait_for_end(60.0)
    with pytest.raises(UserError, match=r"ended with exit code 3:\n  \| no room"):
        node.require_alive()


def test_a_node_that_never_serves_is_given_up(
    deaf: Callable[[str], DemoNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_node, "_START_TIMEOUT_S", 0.0)
    node = deaf("on")
    assert node.stage().startswith("its engine process")
    with pytest.raises(UserError, match="did not serve within 0 s"):
        node.is_serving()
