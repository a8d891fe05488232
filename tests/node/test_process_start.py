"""How a node starts its engine's processes where vLLM would fork, and what a signal to one does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import serve_as_on_cuda
from serve_process import START_S, NodeFiles, ServeProcess, until
from streaming import COMPLETIONS, call, complete, stream, usage_of

from hisparsed.control.status.document import EngineStatus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ANSWER = 400


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    files = NodeFiles(tmp_path_factory.mktemp("as-on-cuda"), supervision={"first_wait": "200ms"})
    served = ServeProcess(files, program=(str(Path(serve_as_on_cuda.__file__)),))
    try:
        yield served.wait_until_ready()
    finally:
        served.kill()


def listens_on(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}


def test_the_engine_is_spawned_and_shares_no_socket(node: ServeProcess) -> None:
    assert listens_on(psutil.Process(node.pid)) == {node.files.port}
    assert node.files.port not in listens_on(node.engine())


def test_a_signal_to_the_engine_never_reaches_the_daemon(node: ServeProcess) -> None:
    restarts = life(node).restarts_total
    engine = node.engine()
    engine.send_signal(signal.SIGTERM)
    until("that engine has ended", lambda: not engine.is_running() or zombie(engine))
    until(
        "another engine serves",
        lambda: life(node).restarts_total > restarts and life(node).state == "serving",
        timeout_s=START_S,
    )
    assert node.process.poll() is None
    assert complete(node.http, "again", 4)["usage"]["completion_tokens"] == 4


def test_a_signal_to_the_group_is_the_daemons_alone(node: ServeProcess) -> None:
    """Ctrl-C and supervisors signal the whole group; what is open ends as after SIGTERM."""
    with stream(node.http, COMPLETIONS, call("group", ANSWER)) as events:
        received = [next(events)]
        for number in (signal.SIGHUP, signal.SIGINT):
            os.killpg(node.pid, number)
        received += events
    assert usage_of(received)["completion_tokens"] == ANSWER
    assert node.wait() == 0, node.log_end()
    assert "Stopped; all calls ended." in node.log()
    node.assert_nothing_left()


def life(node: ServeProcess) -> EngineStatus:
    found = node.status().engine
    assert found is not None
    return found


def zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
