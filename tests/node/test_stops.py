"""How a node ends that is stopped while it starts, or killed at random points of moves.

On the reference node the executor runs in the engine-core process, so killing one kills both.
``HISPARSED_KILL_ROUNDS=10`` makes a long test of it; the seed is fixed.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from serve_process import START_S, NodeFiles, ServeProcess, policy_document, until
from streaming import COMPLETIONS, call, complete, stream

from hisparsed.control.journal.store import FILE_NAME

pytestmark = pytest.mark.engine

Start = Callable[[NodeFiles], ServeProcess]
EXIT_ENGINE_GONE = 70
LONG_ANSWER = 800
"""Tokens; some seconds of generation, which each test cuts short or waits for."""


@pytest.mark.long
def test_sigterm_while_the_control_socket_is_made_leaves_none(
    files: NodeFiles, start: Start
) -> None:
    node = start(files)
    until("its file is there", files.socket.exists, timeout_s=60)
    node.signal(signal.SIGTERM)
    assert node.wait(timeout_s=60) == 0, node.log_end()
    assert "Traceback" not in node.log()
    node.assert_nothing_left()


@pytest.mark.long
def test_sigterm_while_the_engine_starts_leaves_nothing(files: NodeFiles, start: Start) -> None:
    node = start(files)
    until("the engine core starts", node.children, timeout_s=START_S)
    node.signal(signal.SIGTERM)
    assert node.wait(timeout_s=15) == 0, node.log_end()
    assert "Traceback" not in node.log()
    node.assert_nothing_left()


ROUNDS = int(os.environ.get("HISPARSED_KILL_ROUNDS", "1"))


PROMPTS = ["The ledger lends blocks. " * 12, "A hit is the minimum of both pools. " * 9]
CACHES = {"torchinductor_root", f"torchinductor_{os.environ.get('USER', 'root')}"}
"""Files that torch keeps on purpose, for the next process."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that only this test's daemons use."""
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


class Mover:
    """Moves the split, the reserve and the order of a node, through its control API."""

    def __init__(self, node: ServeProcess, rng: random.Random) -> None:
        self._node = node
        self._rng = rng
        self.offload_share = 20

    def move(self) -> None:
        self.offload_share = self._rng.randrange(5, 50)
        with self._node.control_http() as control:
            for key, value in (
                ("pools.offload.start", f"{self.offload_share}%"),
                ("pools.reserve", self._rng.choice(["0%", "4%"])),
                ("admission.order", self._rng.choice(["arrival", "held-prefix-first"])),
            ):
                body = {"actor": "test", "key": key, "value": value, "for_s": None}
                answer = control.post("/v1/policy/set", json=body)
                assert answer.status_code == 200, answer.text


def stream_and_move(node: ServeProcess, mover: Mover, events_until_kill: int) -> list[str]:
    """The result of a stream in which memory moved and the node stopped answering."""
    received: list[str] = []
    with stream(node.http, COMPLETIONS, call(PROMPTS[0], 1500)) as events:
        for event in events:
            received.append(event)
            if len(received) % 8 == 1:
                mover.move()
            if len(received) == events_until_kill:
                return received
    raise AssertionError(f"the stream ended after {len(received)} events")


def kill(node: ServeProcess, victim: str) -> None:
    """SIGKILL, after which all processes of the node must end without help."""
    mapped = shared_memory_of(node.session_members())
    if victim == "engine":
        kill_the_engine_under_a_stream(node)
        assert node.wait() == EXIT_ENGINE_GONE, node.log_end()
        assert "supervision.most_restarts 0" in node.log()
        node.assert_nothing_left()
    else:
        node.signal(signal.SIGKILL)
        assert node.wait() == -signal.SIGKILL
        until("the rest of the node ends by itself", lambda: not node.session_members())
    assert [name for name in mapped if Path(name).exists()] == []


def kill_the_engine_under_a_stream(node: ServeProcess) -> None:
    with stream(node.http, COMPLETIONS, call("victim", LONG_ANSWER)) as events:
        received = [next(events)]
        node.engine().send_signal(signal.SIGKILL)
        try:
            received += events
        except httpx.TransportError as cut:
            received.append(f'"error": {cut}')
    assert any('"error"' in event for event in received), received[-2:]


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    found: set[str] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8", errors="replace")
        paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
        found.update(path for path in paths if path.startswith("/dev/shm/"))  # noqa: S108
    return found


def answers(http: httpx.Client) -> list[str]:
    return [complete(http, prompt, 24)["choices"][0]["text"] for prompt in PROMPTS]


def lent_share(node: ServeProcess) -> float:
    derived = node.status().derived
    assert derived is not None
    pools = derived.pools
    return 100 * pools.offload.capacity_bytes / pools.budget_bytes


def journal_is_whole(files: NodeFiles) -> bool:
    with closing(sqlite3.connect(f"file:{files.state_dir / FILE_NAME}?mode=ro", uri=True)) as store:
        return bool(store.execute("PRAGMA integrity_check").fetchone() == ("ok",))


@pytest.mark.long
@pytest.mark.timeout(300 + 300 * ROUNDS)
def test_killed_at_random_points_of_moves_a_node_comes_back_whole(
    files: NodeFiles, start: Callable[[NodeFiles], ServeProcess], temporary: Path
) -> None:
    quick = {"step": "50%", "step_towards_safety": "50%"}
    at_once = {"cool_down": "0s", "cool_down_towards_safety": "0s"}
    rebalance = {"strategy": "fixed", **quick, **at_once}
    files.write_policy(policy_document(rebalance=rebalance))
    # A daemon that ends with its engine; those that replace it are in test_engine_restarts.
    files.document["supervision"] = {"most_restarts": 0}
    files.write_config()
    rng = random.Random(6)
    expected: list[str] = []
    share = 20
    for victim in ["engine", "daemon"] * ROUNDS:
        node = start(files).wait_until_ready()
        expected = expected or answers(node.http)
        assert answers(node.http) == expected
        mover = Mover(node, rng)
        stream_and_move(node, mover, rng.randrange(9, 120))
        kill(node, victim)
        share = mover.offload_share

    last = start(files).wait_until_ready()
    until("the split is where it was", lambda: abs(lent_share(last) - share) < 1)
    assert answers(last.http) == expected, "a restart changed tokens"
    assert journal_is_whole(files)
    assert last.end() == 0, last.log_end()
    last.assert_nothing_left()
    assert {one.name for one in temporary.iterdir()} <= CACHES
    assert not list(files.state_dir.glob("runtime-folder"))
